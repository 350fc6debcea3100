"""The program moe-evaluate: BLEU and chrF of translations, computed by sacreBLEU."""

import argparse
import json
import re
import sys

from .program import Help, Parser, opened, reported

NAME = "moe-evaluate"
REFERENCE, SOURCE = ("reference", "ref"), ("source", "src")
HEADING = re.compile(r"(?i:target|translation|hyp(othesis)?|system.{0,9})|[a-z]{2,3}(_[A-Za-z]+)?")
DESCRIPTION = """Print BLEU and chrF of translations, and their sacreBLEU signatures.
REFERENCE and TRANSLATIONs have one text per line; - is standard input. TABLE is
a TSV file with a reference and translations; a first row with column names,
such as source, reference, moe or de, is recognised. Of two columns, the first
is the reference unless the second is named reference or ref; of more columns,
all except source and reference are translations."""
NOTES = """With several translations, p is the probability that a BLEU difference from the
first one this large arises by chance (approximate randomisation, 1,000 trials).

Exit status: 0 done, 2 usage error, 3 missing Python package, 4 input error.

Examples:
  cut -f1 test.tsv | moe-translate -t de > out.txt
  cut -f2 test.tsv | moe-evaluate - out.txt other.txt
  moe-evaluate -r de -c moe,other table.tsv"""


def fail(status, text):
    print(f"{NAME}: {text}", file=sys.stderr)
    sys.exit(status)


def parser_of():
    parser = Parser(prog=NAME, usage=f"{NAME} [OPTION]... REFERENCE TRANSLATION...\n       {NAME} [OPTION]... TABLE.tsv",
                    description=DESCRIPTION, epilog=NOTES, formatter_class=Help, add_help=False)
    parser.add_argument("files", nargs="+", metavar="FILE", help=argparse.SUPPRESS)
    table = parser.add_argument_group("Table")
    table.add_argument("-r", "--reference", metavar="COLUMN", help="name of the reference column, or its number from 1")
    table.add_argument("-c", "--columns", metavar="LIST", help="columns of translations, e.g. moe,other or 3,4")
    scores = parser.add_argument_group("Scores")
    scores.add_argument("-t", "--target", metavar="LANG", help="target language, if zh, ja or ko (sets the tokeniser)")
    scores.add_argument("--word-order", metavar="N", type=int, default=0, choices=range(3),
                        help="word n-gram order of chrF; 2 for chrF++ (default: 0)")
    scores.add_argument("--lower-case", action="store_true", help="ignore case")
    other = parser.add_argument_group("Other")
    other.add_argument("--json", action="store_true", help="print one JSON object")
    other.add_argument("-h", "--help", action="help", help="print this help")
    other.add_argument("-V", "--version", action="store_true", help="print the version")
    return parser


def lines_of(path):
    """Return the lines of a UTF-8 file without line breaks."""
    if path == "-":
        data = opened(sys.stdin, "standard input").buffer.read()
    else:
        with open(path, "rb") as file:
            data = file.read()
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: line {data.count(10, 0, error.start) + 1} is not valid UTF-8") from None
    lines = [line.removesuffix("\r") for line in lines[: len(lines) - (not lines[-1])]]
    if not lines:
        raise ValueError(f"{path} is empty")
    return lines


def index_of(column, names, width, path):
    """Return the index of a column, given by its name or its number from 1."""
    if column.lower() in names:
        return names.index(column.lower())
    if column.isdecimal() and 1 <= int(column) <= width:
        return int(column) - 1
    raise ValueError(f"{path} has no column {column!r}; available: {', '.join(names) or f'1 to {width}'}")


def table_of(path, reference, columns):
    """Return [(name, texts)] of a table's columns, the reference first."""
    rows = [line.split("\t") for line in lines_of(path)]
    width, wanted = len(rows[0]), [name for name in [reference, *(columns or "").split(",")] if name]
    if width < 2:
        raise ValueError(f"{path}: line 1 has no TAB: expected a table, or REFERENCE and TRANSLATION")
    first = [cell.strip().lower() for cell in rows[0]]
    named = all(HEADING.fullmatch(cell.strip()) for cell in rows[0]) or any(
        name.lower() in first for name in (*REFERENCE, *SOURCE, *wanted))
    if named:
        print(f"{NAME}: {path}: the first line names the columns: {', '.join(rows[0])}", file=sys.stderr)
    names = first if named else []
    number = index_of(reference, names, width, path) if reference else next(
        (names.index(name) for name in REFERENCE if name in names), 0 if width == 2 else None)
    if number is None:
        fail(2, f"{path} has {width} columns: select the reference with -r NAME or -r N")
    chosen = [index_of(column.strip(), names, width, path) for column in columns.split(",")] if columns else [
        i for i in range(width) if i != number and not (names and names[i] in SOURCE)]
    for line, row in enumerate(rows, 1):
        if len(row) != width:
            raise ValueError(f"{path}: line {line} has {len(row)} columns, but line 1 has {width}")
    body = rows[1:] if named else rows
    if not body or not chosen:
        raise ValueError(f"{path} has no {'translations' if body else 'rows'}")
    return [(names[i] if named else f"column {i + 1}", [row[i] for row in body]) for i in (number, *chosen)]


def read(options):
    if len(options.files) == 1:
        return table_of(options.files[0], options.reference, options.columns)
    if options.reference or options.columns:
        fail(2, f"--reference and --columns require one TABLE; see {NAME} --help")
    if options.files.count("-") > 1:
        fail(2, "standard input cannot be read twice")
    found = [(path, lines_of(path)) for path in options.files]
    for path, lines in found[1:]:
        if len(lines) != len(found[0][1]):
            raise ValueError(f"{path} has {len(lines)} lines, but {found[0][0]} has {len(found[0][1])}")
    return found


def measured(options, reference, systems):
    """Return the scores of each system, and the signatures."""
    import sacrebleu
    from sacrebleu.significance import PairedTest

    language = (options.target or "").split("_")[0].split("-")[0]
    bleu = sacrebleu.BLEU(trg_lang=language, lowercase=options.lower_case)
    chrf = sacrebleu.CHRF(word_order=options.word_order, lowercase=options.lower_case)
    found = [{"name": name, "bleu": bleu.corpus_score(texts, [reference]).score,
              "chrf": chrf.corpus_score(texts, [reference]).score} for name, texts in systems]
    signatures = {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())}
    if len(systems) > 1:
        named = [(f"{number}", texts) for number, (_, texts) in enumerate(systems)]
        chances = PairedTest(named, {"BLEU": bleu}, [reference], "ar", 1000)()[1]["BLEU"]
        for row, chance in list(zip(found, chances))[1:]:
            row["p"] = chance.p_value if row["bleu"] != found[0]["bleu"] else 1.0  # sacreBLEU: the lowest of all
    return found, signatures


def show(options, rows, reference, found, signatures):
    if options.json:
        print(json.dumps({"sentences": rows, "reference": reference, "systems": found, "signatures": signatures},
                         ensure_ascii=False))
        return
    label = f"chrF{'+' * options.word_order}"
    width = max(len(row["name"]) for row in found)
    print(f"{'':{width}}  {'BLEU':>6}  {label:>6}" + "       p" * (len(found) > 1))
    for row in found:
        chance = f"  {row['p']:6.3f}" if "p" in row else ""
        print(f"{row['name']:{width}}  {row['bleu']:6.2f}  {row['chrf']:6.2f}{chance}")
    print(f"texts {rows}, reference {reference}\nBLEU {signatures['bleu']}\n{label} {signatures['chrf']}")


def main(arguments=None):
    return reported(NAME, lambda: run(sys.argv[1:] if arguments is None else arguments))


def run(arguments):
    opened(sys.stdout, "standard output")
    if {"-V", "--version"} & set(arguments):
        from .translator import version

        print(f"{NAME} {version()}")
        return 0
    options = parser_of().parse_args(arguments)
    try:
        (reference, wanted), *systems = read(options)
        found, signatures = measured(options, wanted, systems)
    except ModuleNotFoundError as error:
        fail(3, f"missing Python package {error.name}: pip install {error.name} (in the repository: "
                "tools/install-deps --evaluate)")
    except OSError as error:
        fail(4, f"{error.filename}: {error.strerror}")
    except RuntimeError as error:  # a tokeniser of sacreBLEU lacks a package
        fail(3, " ".join(str(error).split()))
    except ValueError as error:
        fail(4, str(error))
    show(options, len(wanted), reference, found, signatures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
