#!/usr/bin/env python3
"""Translate real documents with the shipped model and check them with code that is independent of the package.

Usage: tests/python tests/package/real_check.py [--kind KIND]... [--sample N] [--moe DIR] [--also DIR] [--again]

Downloads the files of real_corpus.tsv (see real_files.py), shortens long ones, translates each with
moe-documents -s en -t de and checks: exit status and messages; that the file opens again (LibreOffice, msgfmt -c,
xmllint, epubcheck, if installed); and for each text its tags, pairs, placeholders, addresses, options, numbers and
brackets (real_faults.py); and which texts with three words remain untranslated. Results go to build/real-check: a copy
of each document and its translation, results.jsonl, and report.md with a table per format and the texts that fail. An
interrupted run continues; --again starts anew, --check only repeats the checks. The exit status is 1 if a check fails.
"""

import argparse
import collections
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import zipfile

from lxml import etree
from real_faults import faults, is_name, is_same, plain, words
from real_files import found, rows, unpacked
from real_pairs import Damaged, decoded, pairs

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUFFIXES = {
    "po": ".po .pot", "docx": ".docx .dotx .docm", "odt": ".odt .ott .odp", "pptx": ".pptx", "xlsx": ".xlsx",
    "epub": ".epub", "html": ".html .htm .xhtml", "xliff": ".xlf .xliff .sdlxliff .mqxliff", "qt": ".ts",
    "properties": ".properties", "android": ".xml", "json": ".json .arb", "yaml": ".yml .yaml", "table": ".csv .tsv",
    "subtitles": ".srt .vtt .sbv .ass .ssa", "markdown": ".md", "text": ".txt",
}  # fmt: skip
OFFICE = ("docx", "odt", "pptx", "xlsx")
UNTRANSLATED = 0.02  # share of the texts with three words in a format


# ---- Documents ---------------------------------------------------------


def evenly(paths, most):
    return [paths[at * len(paths) // most] for at in range(most)] if len(paths) > most else paths


def documents(options):
    """Yield (kind, name, bytes) of the corpus."""
    for row in rows(None, "real_corpus.tsv"):
        if options.kind and row["kind"] not in options.kind:
            continue
        try:
            paths = evenly(found(row), int(row["most"]))
        except OSError as error:
            print(f"missing: {row['package']}: {str(error)[-100:]!r}", file=sys.stderr)
            continue
        if not paths:
            print(f"missing: {row['package']} {row['path']}", file=sys.stderr)
        for path in paths:
            yield row["kind"], f"{row['package']}/{path.name}", unpacked(path)
    for path in sorted(pathlib.Path(options.also).rglob("*")) if options.also else []:
        kind = next((kind for kind, endings in SUFFIXES.items() if path.suffix in endings.split()), None)
        if kind and path.is_file() and (not options.kind or kind in options.kind):
            yield kind, str(path.relative_to(options.also)), path.read_bytes()


def first_blocks(text, most, sign=r"\n[ \t]*\r?\n"):
    """Return the first `most` blocks of a text, which are separated by blank lines."""
    ends = [at.end() for at in re.finditer(sign, text)]
    return text if len(ends) <= most else text[: ends[most - 1]]


def chosen(options):
    """Yield (kind, name, bytes) of shortened documents with at least three texts, one of each format in turn."""
    groups = collections.defaultdict(list)
    for kind, name, data in documents(options):
        groups[kind].append((kind, name, data))
    queues = [iter(sorted(group, key=lambda at: hashlib.sha256(at[2]).digest())) for group in groups.values()]
    counts = collections.Counter()
    while queues:
        for queue in list(queues):
            for kind, name, data in queue:
                try:
                    data = shortened(kind, data, options.most)
                    texts = data and sum(len(words(source)) > 0 for _, source, _ in pairs(kind, data, data))
                except (Damaged, etree.XMLSyntaxError, ValueError, KeyError, zipfile.BadZipFile) as error:
                    print(f"left out: {name}: {type(error).__name__} {str(error)[:80]}", file=sys.stderr)
                    continue
                if texts and 2 < texts <= 3 * options.most:
                    break
            else:
                queues.remove(queue)
                continue
            counts[kind] += 1
            if counts[kind] == options.sample:
                queues.remove(queue)
            yield kind, name, data


def shortened(kind, data, most):
    """Return a document, shortened to about `most` texts if possible. Return None unless it is English and its
    translations, if any, are German."""
    if kind == "xliff" and not re.search(rb"(?:source-language|srcLang)=[\"']en", data):
        return None
    if kind == "xliff" and re.search(rb"(?:target-language|trgLang)=[\"'](?!de)", data):
        return None
    if kind == "qt" and re.search(rb"<TS[^>]* language=[\"'](?!en|de)", data):
        return None
    if kind in ("xliff", "qt", "android"):
        unit = {"xliff": b"trans-unit|unit", "qt": b"message", "android": b"string|string-array|plurals"}[kind]
        parts = list(re.finditer(rb"[ \t]*<(%s)[\s>].*?</\1>\r?\n?" % unit, data, re.S))[most:]
        for part in reversed(parts):
            data = data[: part.start()] + data[part.end() :]
        return data
    if kind == "epub":
        return short_book(data, most)
    if kind in (*OFFICE, "html", "json"):
        return data
    text = decoded(data)
    before = data[:3] if data[:3] == b"\xef\xbb\xbf" else b""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data
    if kind in ("po", "subtitles") and "[Script Info]" not in text:
        text = first_blocks(text, most)
    elif kind in ("table", "subtitles"):
        text = first_blocks(text, most, r"\n")
    elif kind == "properties":
        text = first_blocks(text, most, r"(?<!\\)\n")
    elif kind == "yaml":
        text = first_blocks(text, most, r"\n(?=[ \t]*[\w\"'-]+:)")
    else:
        text = first_blocks(text, most // 4)
        if text.count("\n```") % 2:
            text += "```\n"
    return before + text.encode(encoding_of(data))


def encoding_of(data):
    try:
        data.decode("utf-8")
        return "utf-8"
    except UnicodeDecodeError:
        return "windows-1252"


def short_book(data, most):
    """Empty the later chapters of a book."""
    left, out = 120 * most, io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for member in old.infolist():
            content = old.read(member)
            if member.filename.endswith((".xhtml", ".html", ".htm")) and b'type="toc"' not in content:
                text = re.sub(rb"<[^<>]*>", b"", content)
                if left < 0:
                    content = re.sub(rb"(<body[^>]*>).*(</body>)", rb"\1<p>End</p>\2", content, flags=re.S)
                left -= len(text)
            new.writestr(member, content)
    return out.getvalue()


# ---- Programs ----------------------------------------------------------


def run(command, **options):
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, **options)
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, 124, "", f"no end after {error.timeout} s")


def translate(options, path, output):
    """Translate a file; return (status, messages, seconds)."""
    moe = pathlib.Path(options.moe).resolve()
    environment = os.environ | {
        "PYTHONPATH": str(moe / "tools/python"),
        "MOE_LIBRARY": str(moe / "libmoetext.so"),
        "MOE_MODEL": str(moe / "models/en-de-fr-es.bin"),
    }
    command = [str(moe / "moe-documents"), "-s", "en", "-t", "de", str(path), "-o", str(output)]
    start = time.monotonic()
    done = run(command, env=environment, timeout=options.timeout)
    return done.returncode, done.stderr, round(time.monotonic() - start, 1)


def opens(kind, before, after):
    """Return a checker's error for a translated file, or "" if the source has the same error."""
    if kind == "po":
        said = [run(["msgfmt", "-c", "--use-fuzzy", "-o", "/dev/null", str(path)]) for path in (before, after)]
    elif kind in ("xliff", "qt", "android") and shutil.which("xmllint"):
        said = [run(["xmllint", "--noout", "--nonet", str(path)]) for path in (before, after)]
    elif kind == "epub" and shutil.which("epubcheck"):
        jar = os.path.realpath(shutil.which("epubcheck"))
        errors = [collections.Counter(), collections.Counter()]
        for found_, path in zip(errors, (after, before), strict=True):
            said = run(["java", "-jar", jar, str(path)])
            found_.update(re.findall(r"^(?:ERROR|FATAL)\([A-Z]+-\d+\)", said.stderr + said.stdout, re.M))
            if not errors[0]:
                return ""
        return "epubcheck: " + str(dict(errors[0] - errors[1])) if errors[0] - errors[1] else ""
    else:
        return ""
    return said[1].stderr.strip()[-400:] if said[1].returncode and not said[0].returncode else ""


def pdfs(store, records):
    """Convert the translated office files with LibreOffice; record which yield no PDF although their sources do."""
    if not shutil.which("soffice"):
        return
    left = [at for at in records if at["kind"] in OFFICE and at["status"] in (0, 1)]
    for part in ("out", "in"):
        files = {store / at["file"].replace(".in.", f".{part}."): at for at in left}
        made = {path: path.with_name(path.stem + ".pdf") for path in files}
        missing = [str(path) for path in files if not made[path].exists()]
        home = f"-env:UserInstallation=file://{store}/soffice"
        for at in range(0, len(missing), 25):
            convert = ["--headless", home, "--convert-to", "pdf", "--outdir", str(store)]
            run(["soffice", *convert, *missing[at : at + 25]], timeout=600)
        if part == "out":
            left = [at for path, at in files.items() if not made[path].exists()]
        else:
            for path, at in files.items():
                at["opens"] = "LibreOffice makes no PDF" if made[path].exists() else at["opens"]


# ---- Checks ------------------------------------------------------------


def letters(text):
    return re.sub(r"[\W_]+", "", re.sub(r"</?x\d+/?>|\\[nrtu]", "", text)).lower()


def check(record, before, after):
    """Add the faults of a translated file to its record."""
    messages = record.pop("messages")
    record |= {"texts": 0, "long": 0, "faults": [], "hints": [], "untranslated": [], "damaged": ""}
    noted = [letters(line) for line in messages.splitlines()]
    if re.search(r"Traceback|\b[A-Z]\w+(?:Error|Exception)\b", re.sub(r": ['\"].*", "", messages)):
        record["damaged"] = "an exception's name: " + messages.strip()[-200:]
        return
    if record["status"] not in (0, 1):
        record["refused"] = messages.strip()[-160:]
        return
    try:
        for place, source, translation in pairs(record["kind"], before, after):
            if not words(source):
                old, new = is_same(source, translation)
                if new and old != new:
                    record["hints"].append(["?no words, changed", place, plain(source), plain(translation), ""])
                continue
            record["texts"] += 1
            long = len(words(source)) >= 3 and not is_name(source)
            record["long"] += long
            old, new = is_same(source, translation)
            if not new or old == new:
                start = letters(plain(source))[:16]
                if long:
                    record["untranslated"].append([any(start in line for line in noted), place, plain(source)])
                continue
            for name, detail in faults(source, translation):
                where = "hints" if name.startswith("?") else "faults"
                record[where].append([name, place, shown(source), shown(translation), detail])
    except (Damaged, etree.XMLSyntaxError, ValueError, zipfile.BadZipFile, KeyError) as error:
        record["damaged"] = f"{type(error).__name__}: {error}"[:500]


def shown(items):
    return "".join(
        item if isinstance(item, str) else {"(": "<%s>", ")": "</%s>", ".": "<%s/>"}[item[0]] % item[1][:30]
        for item in items
    )


# ---- Report ------------------------------------------------------------


COLUMNS = {
    "files": len,
    "refused": lambda of: sum("refused" in at for at in of),
    "damaged": lambda of: sum(bool(at["damaged"]) for at in of),
    "opens not": lambda of: sum(bool(at["opens"]) for at in of),
    "texts": lambda of: sum(at["texts"] for at in of),
    "with 3 words": lambda of: sum(at["long"] for at in of),
    "untranslated": lambda of: f"{len(bare(of))} ({100 * len(bare(of)) / max(1, sum(at['long'] for at in of)):.1f} %)",
    "without a note": lambda of: sum(not at[0] for at in bare(of)),
    "seconds": lambda of: int(sum(at["seconds"] for at in of)),
}


def bare(records):
    return [text for at in records for text in at["untranslated"]]


def table(records):
    kinds = collections.Counter(name for at in records for name, *_ in at["faults"])
    names = [name for name, _ in kinds.most_common()]
    lines = [" | ".join(["| format", *COLUMNS, *names, ""]), "|" + "---|" * (1 + len(COLUMNS) + len(names))]
    groups = collections.defaultdict(list)
    for record in records:
        groups[record["kind"]].append(record)
    for kind, of in [*sorted(groups.items()), ("all", records)]:
        counts = collections.Counter(name for at in of for name, *_ in at["faults"])
        cells = [kind, *(column(of) for column in COLUMNS.values()), *(counts[name] for name in names)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def examples(records, part="faults", each=2):
    """Return the faults by kind with examples from different files."""
    by = collections.defaultdict(list)
    for record in records:
        for name, place, source, translation, detail in record[part]:
            by[name].append((record["name"], place, source, translation, detail))
    lines = []
    for name, found_ in sorted(by.items(), key=lambda item: -len(item[1])):
        lines.append(f"\n### {name}: {len(found_)} texts in {len({at[0] for at in found_})} files\n")
        seen = set()
        for file, place, source, translation, detail in found_:
            if file not in seen or each > 50:
                seen.add(file)
                lines.append(f"- {file} {place!r}: {detail}\n  - `{source[:300]!r}`\n  - `{translation[:300]!r}`")
            if len(seen) == each:
                break
    return "\n".join(lines)


def report(records, commit, each):
    lines = [f"# Real files, {commit}\n", table(records), "\n## Files that are refused, damaged or do not open\n"]
    for record in records:
        for key in ("refused", "damaged", "opens"):
            if record.get(key):
                lines.append(f"- {key}: {record['kind']} {record['name']}: {record[key]}")
    lines.append("\n## Untranslated texts with three words\n")
    for record in records:
        for noted, place, text in record["untranslated"][:each]:
            state = "noted" if noted else "WITHOUT A NOTE"
            lines.append(f"- {state}: {record['name']} {place[-60:]!r}: {text[:150]!r}")
    lines += ["\n## Faults by kind", examples(records, "faults", each), "\n## Hints", examples(records, "hints", 3)]
    return "\n".join(lines) + "\n"


def fails(records):
    """Return whether a check fails: any fault or damage, or too many untranslated texts in a format."""
    for kind in {at["kind"] for at in records}:
        of = [at for at in records if at["kind"] == kind]
        if len(bare(of)) > UNTRANSLATED * sum(at["long"] for at in of) or not all(noted for noted, *_ in bare(of)):
            return True
    return any(at["faults"] or at["damaged"] or at["opens"] or "refused" in at for at in records)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kind", action="append", help="only this format")
    parser.add_argument("--sample", type=int, help="at most N files of each format")
    parser.add_argument("--most", type=int, default=120, help="shorten documents to about N texts (default: 120)")
    parser.add_argument("--moe", default=str(ROOT), help="built checkout to test (default: this one)")
    parser.add_argument("--also", help="folder with more documents")
    parser.add_argument("--store", default=str(ROOT / "build/real-check"), help="folder of the results")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for a document")
    parser.add_argument("--again", action="store_true", help="translate all files anew")
    parser.add_argument("--check", action="store_true", help="check earlier translations only")
    parser.add_argument("--each", type=int, default=1000, help="texts per kind of fault in the report")
    return parser.parse_args()


def main():
    options = arguments()
    store = pathlib.Path(options.store)
    os.makedirs(store, exist_ok=True)
    commit = run(["git", "-C", options.moe, "describe", "--always", "--dirty"]).stdout.strip()
    records = []
    for kind, name, data in chosen(options):
        ending = SUFFIXES[kind].split()[0] if kind == "text" else pathlib.Path(name.removesuffix(".gz")).suffix
        base = f"{kind}-{hashlib.sha256(name.encode() + data).hexdigest()[:8]}"
        before, after, log = store / f"{base}.in{ending}", store / f"{base}.out{ending}", store / f"{base}.json"
        if options.check and not log.exists():
            continue
        if options.again or not log.exists():
            before.write_bytes(data)
            for old in (after, after.with_name(after.stem + ".pdf")):
                old.unlink(missing_ok=True)
            result = dict(zip(("status", "messages", "seconds"), translate(options, before, after), strict=True))
            result |= {"commit": commit, "opens": opens(kind, before, after) if after.exists() else ""}
            log.write_text(json.dumps(result), encoding="utf-8")
        record = {"kind": kind, "name": name, "file": before.name} | json.loads(log.read_text(encoding="utf-8"))
        check(record, data, after.read_bytes() if after.exists() else b"")
        records.append(record)
        bad = f"{len(record['faults'])} faults, {len(record['untranslated'])} of {record['long']} untranslated"
        state = record.get("refused") or record["damaged"] or record.get("opens") or bad
        print(f"{record['seconds']:6} s  {record['status']}  {kind:10} {name}: {state[:110]}", flush=True)
    if not options.check:
        pdfs(store, records)
    with open(store / "results.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (store / "report.md").write_text(report(records, commit, options.each), encoding="utf-8")
    print(table(records))
    return int(fails(records))


if __name__ == "__main__":
    sys.exit(main())
