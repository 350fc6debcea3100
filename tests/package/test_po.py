#!/usr/bin/env python3
"""Test PO files: msgfmt -c must accept the translations. Also test line breaks, drafts, plural forms and access keys.

Usage: tests/python tests/package/test_po.py
"""

import pathlib
import re
import shutil
import subprocess
import sys
import time

import polib
from moe_translate import Translator, po
from moe_translate.documents import translate_document
from suite import Suite

ROOT = pathlib.Path(__file__).resolve().parents[2]
test = Suite()
HEAD = 'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=UTF-8\\n"\n\n'


def louder(texts):
    """Return texts in capitals with unchanged conversions and tags."""
    return ["".join(p if p[:1] in "<%" else p.upper() for p in re.split(r"(<[^<>]*>|%\(\w+\)s|%\w)", t)) for t in texts]


def translated(data, translate=louder, reports=None, **options):
    kept = None if reports is None else lambda *what: reports.append(what)
    return translate_document(data, "po", translate, kept, **options)


def messages(data):
    return {entry.msgid: entry.msgstr for entry in polib.pofile(data)}


def check(data):
    if not shutil.which("msgfmt"):
        return
    done = subprocess.run(
        ["msgfmt", "-c", "-o", "/dev/null", "--use-fuzzy", "-"], input=data.encode(), capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


@test
def the_number_of_line_breaks_is_preserved():
    ids = ("First line.\nSecond line.\n", "Usage: prog [OPTION]\n\n  -h   show this help\n", "\nA\n\n\nb")
    long = "This is a sentence that was wrapped by its author, and that\ngoes on here.\n"
    data = HEAD + "".join(f'msgid "{polib.escape(text)}"\nmsgstr ""\n\n' for text in (*ids, long))
    for translate in (
        louder,
        lambda texts: ["A very long answer, " * 9] * len(texts),
        lambda texts: ["a"] * len(texts),
    ):
        got = translated(data, translate)
        check(got)
        for msgid, msgstr in messages(got).items():
            assert msgstr.count("\n") == msgid.count("\n"), (msgid, msgstr)
    given = []
    translated(data, lambda texts: given.extend(texts) or texts)
    assert "This is a sentence that was wrapped by its author, and that goes on here." in given


@test
def each_message_gets_its_translation():
    for head in ("", HEAD, "\ufeff"):
        data = head + '  msgid "Good morning"\n  msgstr ""\n\nmsgid "Good evening"\nmsgstr ""\n'
        got = messages(translated(data).lstrip("\ufeff"))
        assert got == {"Good morning": "GOOD MORNING", "Good evening": "GOOD EVENING"}, (head, got)


@test
def drafts_are_kept_unless_overwriting():
    data = HEAD + '#, fuzzy\nmsgid "House"\nmsgstr "Hau"\n'
    assert translated(data) == data
    assert messages(translated(data, overwrite=True)) == {"House": "HOUSE"}


@test
def headers_of_templates_are_completed():
    data = (
        'msgid ""\nmsgstr ""\n"Language: \\n"\n"Content-Type: text/plain; charset=CHARSET\\n"\n'
        '"Content-Transfer-Encoding: 8bit\\n"\n"Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;\\n"\n\n'
        '#, c-format\nmsgid "One file"\nmsgid_plural "%d files"\nmsgstr[0] ""\nmsgstr[1] ""\n'
    )
    for target, count in (
        ("de", 2),
        ("fr", 2),
        ("rus_Cyrl", 3),
        ("ja", 1),
        ("ar", 6),
        ("pl", 3),
        ("ga", 5),
        ("pt_BR", 2),
    ):
        got = translated(data, target=target)
        check(got)
        assert "charset=UTF-8" in got and f"nplurals={count};" in got and got.count("msgstr[") == count, (target, got)
        assert polib.pofile(got).metadata["Language"] == {"rus_Cyrl": "ru"}.get(target, target)


@test
def missing_plural_forms_are_added():
    data = HEAD + 'msgid "a dog"\nmsgid_plural "%d dogs"\nmsgstr[0] ""\nmsgstr[1] ""\n'
    got = translated(data, target="fr")
    check(got)
    assert '\\n"\n"Plural-Forms: nplurals=2; plural=(n > 1);\\n"\n\n' in got, got


@test
def branches_of_icu_messages_are_translated():
    message = "You have {n, plural, one {one letter} other {# letters}} today."
    with Translator(str(ROOT / "models" / "en-de-fr-es.bin"), beam=2, rerank=0, target="de") as model:
        got = translated(
            HEAD + f'msgid "{message}"\nmsgstr ""\n', lambda texts: [model.translate(text) for text in texts]
        )
    assert messages(got)[message] == "Du hast {n, plural, one {ein Brief} other {# Briefe}} heute.", got


@test
def wrapped_sentences_have_no_empty_lines():
    text = "A Makefile and a Windows command file can be generated for you\nonly to run e.g. this for it\ndirectly."
    data = HEAD + f'msgid "{polib.escape(text)}"\nmsgstr ""\n'
    for answer in ("Ein langes Wort und dann einsehrlangeswortamende", "a b c", "x " * 30):
        got = messages(translated(data, lambda texts: [answer] * len(texts)))[text]
        assert all(got.split("\n")) and got.count("\n") == 2, got


@test
def different_conversions_are_rejected():
    data = HEAD + '#, c-format\nmsgid "%s has %d"\nmsgstr ""\n\n#, python-format\nmsgid "See %(name)s"\nmsgstr ""\n'
    for answers in (["%d hat %s", "Siehe %(nam)s"], ["%s hat", "Siehe"], ["%s hat %d %s", "100 % sicher %(name)s"]):
        reports = []
        got = translated(data, lambda texts: answers if len(texts) == 2 else texts, reports)
        check(got)
        assert messages(got) == {"%s has %d": "", "See %(name)s": ""}, got
        assert [place for place, _ in reports] == ["line 5", "line 9"], reports
    for flag in "", "#, perl-maketext-format\n":
        data = HEAD + flag + 'msgid "[quant,_2,file,files] in [_1]"\nmsgstr ""\n'
        for answer, wanted in ("[_1]: [quant,_2,file,files]",) * 2, ("[quant,_2,Datei] in [_1]", ""), ("Da", ""):
            got = translated(data, lambda texts: [answer])  # noqa: B023
            assert list(messages(got).values()) == [wanted], got


@test
def untranslatable_messages_remain_empty():
    reports = []
    got = translated(HEAD + 'msgid "Good"\nmsgstr ""\n', lambda texts: [""] * len(texts), reports)
    assert messages(got) == {"Good": ""} and len(reports) == 1 and reports[0][0] == "line 5", (got, reports)


@test
def access_keys_are_kept():
    data = HEAD + "".join(f'msgid "{t}"\nmsgstr ""\n\n' for t in ("&File", "E_xit", "R&D", "file_name", "Save &As"))
    given = []
    got = messages(translated(data, lambda texts: given.extend(texts) or ["Datei"] * len(texts)))
    assert given == ["File", "Exit", "R&D", "file_name", "Save As"], given
    assert got["&File"] == "&Datei" and got["E_xit"] == "_Datei" and got["Save &As"] == "D&atei", got


@test
def long_comments_take_linear_time():
    comments, begin = "# a\n" * (1 << 19), time.process_time()  # regression: quadratic time took 24 s
    text = translate_document(comments + 'msgid "a b"\nmsgstr ""\n', "po", lambda texts: ["c d" for _ in texts])
    assert text == comments + '#, fuzzy\nmsgid "a b"\nmsgstr "c d"\n' and time.process_time() - begin < 8


@test
def continuation_lines_are_not_appended_one_by_one():  # polib takes quadratic time
    parser, put = polib._POFileParser, []
    handlers = {name: getattr(parser, name) for name in ("handle_mc", "handle_tc", "handle_he")}
    message = 'msgid "a b"\nmsgstr ""\n'
    try:
        for name, handler in handlers.items():
            setattr(parser, name, lambda self, handler=handler: put.append(self.current_line) or handler(self))
        for before, line, after in (
            ('msgid ""\n', '"a "\n', 'msgstr ""\n'),
            ('msgctxt ""\n', '"a "\n', message),
            ('msgid "a"\nmsgid_plural ""\n', '"a "\n', 'msgstr[0] ""\nmsgstr[1] ""\n'),
            ('msgid "a b"\nmsgstr ""\n', '"a "\n', "\n" + message),
            ('#| msgid ""\n', '#| "a "\n', message),
            (message + '\n#~ msgid ""\n', '#~ "a "\n', '#~ msgstr ""\n'),
            ('msgid ""\nmsgstr "A: b\\n"\n', '"a\\n"\n', "\n" + message),
            *(("", comment, message) for comment in ("# a\n", "#. a\n", "#: a\n", "## a\n", "\t# a\n", "#~ # a\n")),
        ):
            entries = po.read(before + 100 * line + after)
            assert not put, (before, line, put[:3])
            assert entries[-1].msgid or entries[-1].obsolete, before
        assert po.read(HEAD + message)[0].msgid == ""  # polib parses the fields of the header itself
    finally:
        for name, handler in handlers.items():
            setattr(parser, name, handler)


@test
def strings_can_span_lines():
    rows = [r'"50 \\"', r'"n \"so\" "', '""', r'"\ta\n"  ', '\t"b %s"']
    one = "".join(row.strip()[1:-1] for row in rows)
    for end in "\n", "\r\n", "\r":
        before = ["# c", "#| msgid " + rows[0], *("#| " + row.strip() for row in rows[1:]), "#, c-format"]
        lines = [*before, "msgid " + rows[0], *rows[1:], 'msgstr ""', "", 'msgid "a b %s"', 'msgstr ""', ""]
        reports, data = [], end.join(lines)
        got = translated(data, lambda texts: [text.replace("%s", "") for text in texts], reports)
        assert [place for place, _ in reports] == ["line 2", f"line {len(lines) - 2}"], reports
        assert [line for line in re.split("\r\n|\r|\n", got) if line != "#, fuzzy"] == lines, got
        entries = po.read(data)
        assert [entry.msgid for entry in entries] == [polib.unescape(one), "a b %s"], entries
        assert entries[0].previous_msgid == polib.unescape(one) and entries[0].flags == ["c-format"], entries


@test
def tabs_separate_texts_and_keys_stay():
    text = 'msgid "&Save it\\tCtrl+S"\nmsgstr ""\n\nmsgid "the dog\\tF10\\t\\tthe cat"\nmsgstr ""\n'
    seen = []
    got = translate_document(text, "po", lambda texts: seen.extend(texts) or [text.upper() for text in texts])
    assert seen == ["Save it", "the dog", "the cat"], seen
    assert 'msgstr "&SAVE IT\\tCtrl+S"' in got and 'msgstr "THE DOG\\tF10\\t\\tTHE CAT"' in got, got


if __name__ == "__main__":
    sys.exit(test.run())
