"""Gettext's PO files: add missing translations, marked fuzzy; with overwrite, replace existing ones too. polib parses
the file; all other lines are copied byte for byte. A template (.pot) receives the charset and the target's plural
forms. A translation whose placeholders (%s, {name}) differ from those of its message is reported and not written."""

import re

import polib

from .conversions import conversions
from .languages import declared, two_letters
from .lines import Line, text_parts

LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
ENTRY = re.compile(r'^\s*(?:msgctxt|msgid)\s*"')
# Lines that polib appends one at a time, in quadratic time: comments, and the lines of a string.
COMMENT = re.compile(r"^[ \t]*(?:#~[ \t]+)?#(?:[ \t.:#][^\r\n]*)?(?=[\r\n]|\Z)", re.M)
STRING = r'"([^"\\\r\n]*(?:\\[^\r\n][^"\\\r\n]*)*)"'
LINES = re.compile(
    rf"^[ \t]*(?:#[~|][ \t]*)?(?:msg[a-z_]+(?:\[\d+\])?[ \t]*)?{STRING}[ \t]*"
    rf"(?:(?:\r\n|\r|\n)[ \t]*(?:#[~|][ \t]*)?{STRING}[ \t]*)+(?=[\r\n]|\Z)",
    re.M,
)
UNEXPECTED = re.compile(
    r"^(?![\ufeff \t]*(?:#|[\r\n]|\Z))"
    rf"(?![\ufeff \t]*(?:(?:msgctxt|msgid(?:_plural)?|msgstr(?:\[\d+\])?|domain)[ \t]*)?{STRING}\s*?$).",
    re.M,
)
MSGSTR = re.compile(r'^(\s*msgstr(?:\[(\d+)\])?)\s*"')
EMPTY = "\x00"  # marks an untranslated text in a msgstr
OURS = re.compile("\x01(\\d+)\x02")  # starts a new msgstr; contains the message's line number
# characters that polib, unlike gettext, treats as line ends
SEPARATORS = {ord(sign): 0xF700 + at for at, sign in enumerate("\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")}
BACK = {there: here for here, there in SEPARATORS.items()}
# Plural forms by language, from Unicode's CLDR and gettext's table.
PLURALS = {
    "nplurals=1; plural=0;": "ja ko zh vi th lo id ms my jv su km tpi yue",
    "nplurals=2; plural=(n != 1);": "en de nl sv da no nb nn fo et fi hu it es el bg ca gl eu eo he tr az ka kk ky uz "
    "mn "
    "sw ur ta te ml kn mr ne bn gu or pa sq af hy is_IS lb ast fur ha ig so xh zu sd ps rm st tn ts ug tt",
    "nplurals=2; plural=(n > 1);": "fr pt_BR br oc ln mg fil tl ti wa fa hi am as",
    "nplurals=2; plural=(n%10!=1 || n%100==11);": "is mk",
    "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 "
    ": n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);": "ru uk be",
    "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 "
    ": n%10>=2 && n%10<=4 && (n%100<12 || n%100>14) ? 1 : 2);": "hr sr bs sh",
    "nplurals=3; plural=(n==1 ? 0 : n>=2 && n<=4 ? 1 : 2);": "cs sk",
    "nplurals=3; plural=(n==1 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);": "pl",
    "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && (n%100<10 || n%100>=20) ? 1 : 2);": "lt",
    "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n != 0 ? 1 : 2);": "lv",
    "nplurals=3; plural=(n==1 ? 0 : (n==0 || (n%100 > 0 && n%100 < 20)) ? 1 : 2);": "ro mo",
    "nplurals=4; plural=(n%100==1 ? 0 : n%100==2 ? 1 : n%100==3 || n%100==4 ? 2 : 3);": "sl",
    "nplurals=5; plural=(n==1 ? 0 : n==2 ? 1 : n<7 ? 2 : n<11 ? 3 : 4);": "ga",
    "nplurals=4; plural=(n==1 ? 0 : n==2 ? 1 : (n != 8 && n != 11) ? 2 : 3);": "cy",
    "nplurals=4; plural=(n==1 ? 0 : n==0 || (n%100>1 && n%100<11) ? 1 : (n%100>10 && n%100<20) ? 2 : 3);": "mt",
    "nplurals=6; plural=(n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n%100>=3 && n%100<=10 ? 3 : n%100>=11 ? 4 : 5);": "ar",
}
PLURALS_OF = {name: forms for forms, names in PLURALS.items() for name in names.split()} | {
    "pt": "nplurals=2; plural=(n != 1);"
}


class Message(Line):
    """A line of a msgstr, or several lines that form a sentence. Untranslated text becomes EMPTY, for finish()."""

    speaks = False  # finish() reports failures

    def __init__(self, lines, newline, keys=False):
        super().__init__(lines, polib.escape, newline, keys)

    def accept_pieces(self, translations):
        if not all(answer for answer, piece in zip(translations, self.pieces()) if piece):
            return self.original()
        return super().accept_pieces(translations)

    def unchanged(self):
        return super().original()

    def original(self):
        return EMPTY if self.source() else super().original()


def message(keyword, text, newline, line):
    """Return the parts of one msgstr; line: line number of the message."""
    return [f'{keyword} "\x01{line}\x02', *text_parts(text, Message, "\\n", keys=True), '"' + newline]


def plurals_of(target):
    language = two_letters(target) if target else ""
    return PLURALS_OF.get(language) or PLURALS_OF.get(language.split("_")[0])


def header(lines, target, plural, filled):
    """Return the lines of the header's msgstr; fill in the blanks of a template. filled: the file has translations."""
    language, forms, found, text = two_letters(target) if target else None, plurals_of(target), [], "".join(lines)
    named = re.search(r"(?:\"|\\n)Language: *([^\\\"]*)", text)
    renamed = named and declared(named[1].strip(), target, filled)
    for line in lines:
        line = line.replace("charset=CHARSET", "charset=UTF-8")
        line = line.replace("Content-Transfer-Encoding: ENCODING", "Content-Transfer-Encoding: 8bit")
        if forms and (renamed and named[1].strip() or re.search(r"Plural-Forms: *nplurals=INTEGER", line)):
            line = re.sub(r"Plural-Forms:[^\\\"]*", lambda _: "Plural-Forms: " + forms, line)
        if renamed:
            line = re.sub(r"(\"|\\n)Language:[^\\\"]*", lambda match: f"{match[1]}Language: {language}", line)
        found.append(line)
    if forms and plural and found and "Plural-Forms:" not in text:
        found.append(f'"Plural-Forms: {forms}\\n"' + line_end(found[-1]))
    return found


def parts(data, overwrite=False, target=None):
    """Return the file's lines; the parts to translate replace the lines of each msgstr to fill."""
    if re.search("[\x00-\x02]", data):
        raise ValueError("unexpected control character")
    lines = LINE.findall(data)
    wanted, forms, filled = {}, plurals_of(target), False
    for entry in read(data):
        if not entry.obsolete and entry.msgid and (overwrite or not has_translation(entry)):
            wanted[entry.linenum - 1] = entry
        filled |= bool(not overwrite and entry.msgid and not entry.obsolete and has_translation(entry))
    head = header_line(data)
    if head is not None:
        first, last = strings_of(lines, head)
        lines[first:last] = header(lines[first:last], target, "msgid_plural" in data, filled)
        match = re.search(r"Plural-Forms: *(nplurals *= *[1-9] *;[^\"\\]*)", "".join(lines[first:last]))
        forms = match[1] if match else forms
    found, at = [], 0
    while at < len(lines):
        entry = wanted.get(at)
        if entry is None:
            found.append(lines[at])
            at += 1
            continue
        at = one_entry(entry, lines, at, found, forms)
    return found


class Messages(polib.POFile):
    """Parse the header's fields, joining those that span several lines."""

    def find(self, *_, **__):
        return None


def in_one_line(lines):
    """Join a string that spans several lines into one line, followed by the same number of line ends."""
    strings = re.findall(STRING, lines[0])
    return lines[0][: lines[0].index('"')] + f'"{"".join(strings)}"' + "\n" * (len(strings) - 1)


def read(data):
    """Return polib's entries; linenum of each is the number of its first line."""
    data = COMMENT.sub("", data.translate(SEPARATORS))
    if bad := UNEXPECTED.search(re.sub("\r\n?", "\n", data)):
        line = bad.string.count("\n", 0, bad.start()) + 1
        raise ValueError(f"not a PO file: line {line}: expected msgid, msgstr or a string in quotes")
    try:
        entries = list(polib.pofile(LINES.sub(in_one_line, data) + "\n", klass=Messages))
    except (OSError, ValueError, UnicodeError) as error:
        line = re.search(r"\(line (\d+)\)(.*)", str(error)) or ["", "?", ": " + str(error)]
        raise ValueError(f"not a PO file: line {line[1]}{line[2] or ': unexpected text'}") from None
    for entry in entries:
        if not entry.linenum:  # polib does not set the first entry's linenum
            entry.linenum = next(n for n, line in enumerate(LINE.findall(data), 1) if line.strip("\ufeff \t\r\n"))
        entry.msgid, entry.msgid_plural = entry.msgid.translate(BACK), entry.msgid_plural.translate(BACK)
    return entries


def header_line(data):
    """Return the number of lines before the message with an empty msgid, or None."""
    match = re.search(r'^[ \t]*msgid[ \t]+""[ \t]*\r?\n[ \t]*msgstr', data, re.M)
    return len(LINE.findall(data[: match.start()])) if match else None


def has_translation(entry):
    """Return whether an entry has a translation. Fuzzy translations count, because they are human drafts."""
    return bool(entry.msgstr.strip()) or any(text.strip() for text in entry.msgstr_plural.values())


def strings_of(lines, at):
    """Return the lines [first, last) of the msgstr of the entry at `at`."""
    while at < len(lines) and not MSGSTR.match(lines[at]):
        at += 1
    first = at
    while at < len(lines) and (MSGSTR.match(lines[at]) or lines[at].lstrip().startswith('"')):
        at += 1
    return first, at


def one_entry(entry, lines, at, found, forms):
    """Append the lines and Segments of an entry to `found`; return the number of the next line."""
    flagged = "fuzzy" in entry.flags
    first, last = strings_of(lines, at)
    for line in lines[at:first]:
        sign = line.lstrip()[:2]
        if not flagged and sign == "#,":
            line, flagged = line.replace("#,", "#, fuzzy,", 1), True
        elif not flagged and (sign == "#|" or ENTRY.match(line)):
            found.append("#, fuzzy" + line_end(line))
            flagged = True
        found.append(line)
    if first == last:
        raise ValueError(f"not a PO file: line {entry.linenum}: msgid without msgstr")
    names = [match[1].strip() for line in lines[first:last] if (match := MSGSTR.match(line))]
    for name in names if len(set(names)) < len(names) else ():
        if names.count(name) > 1:
            raise ValueError(f"not a PO file: line {entry.linenum}: duplicate {name}")
    end, indent = line_end(lines[first]), re.match(r"\s*", lines[first])[0]
    if not entry.msgid_plural:
        found += message(indent + "msgstr", entry.msgid, end, entry.linenum)
        return last
    match = re.match(r"nplurals *= *(\d)", forms or "")
    count = int(match[1]) if match else max(2, len(entry.msgstr_plural))
    # If a language uses the first form for numbers other than 1, it must contain the number, as the plural does.
    once = count == 2 and "%" not in (forms or "") and ">" not in (forms or "")
    same = once or conversions(entry.msgid, entry.flags) == conversions(entry.msgid_plural, entry.flags)
    for number in range(count):
        text = entry.msgid if number == 0 and count > 1 and same else entry.msgid_plural
        found += message(f"{indent}msgstr[{number}]", text, end, entry.linenum)
    return last


def line_end(line):
    return line[len(line.rstrip("\r\n")) :] or "\n"


# ---- Results -----------------------------------------------------------


def finish(text, report):
    """Remove invalid translations from the file; call report(source line number, why) for each."""
    lines = LINE.findall(text)
    ours = {at: match[1] for at, line in enumerate(lines) if (match := OURS.search(line))}
    empty = {at for at in ours if EMPTY in lines[at]}
    plain = OURS.sub("", text).replace(EMPTY, "")
    lines = LINE.findall(plain)
    for entry in read(plain):
        first, last = strings_of(lines, entry.linenum - 1)
        mine = [at for at in range(first, last) if at in ours]
        if entry.obsolete or not mine:
            continue
        if not empty.isdisjoint(mine):
            why = "could not be translated"
        elif not fits(entry):
            why = "placeholders (%s, {name}) differ in the translation"
        else:
            continue
        report(int(ours[mine[0]]), f"{why}; left untranslated: {entry.msgid[:60]!r}")
        for at in mine:
            lines[at] = MSGSTR.match(lines[at])[1] + ' ""' + line_end(lines[at])
    return "".join(lines)


def fits(entry):
    """Return whether each translation has the placeholders of its message."""
    one, many = conversions(entry.msgid, entry.flags), conversions(entry.msgid_plural, entry.flags)
    for text in entry.msgstr_plural.values() if entry.msgid_plural else [entry.msgstr]:
        if text.startswith("\n") != entry.msgid.startswith("\n") or text.endswith("\n") != entry.msgid.endswith("\n"):
            return False
    if not entry.msgid_plural:
        return conversions(entry.msgstr, entry.flags) == one
    texts = [entry.msgstr_plural[number] for number in sorted(entry.msgstr_plural)]
    found = [conversions(text, entry.flags) for text in texts]
    return all(these == many for these in found[1:]) and found[0] in (one, many)
