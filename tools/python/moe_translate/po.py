"""Gettext's PO files: messages without a translation get one, marked fuzzy; polib reads, all other lines stay."""

import re

import polib

from .segments import Segment

MSGSTR = re.compile(r'^(msgstr(?:\[(\d+)\])?)\s+"')


class Message(Segment):
    """One msgstr. Line breaks at its ends and inside stay where they are."""

    def __init__(self, keyword, text, newline):
        self.keyword, self.newline = keyword, newline
        super().__init__([text])

    def _whole(self, raw):
        return f'{self.keyword} "{polib.escape(super()._whole(raw))}"{self.newline}'


def parts(data, overwrite=False):
    """Lines of the file, and a Message for each msgstr that is wanted."""
    lines = data.splitlines(keepends=True)
    wanted = {}  # line of the entry's first keyword -> entry
    for entry in polib.pofile(data):
        if not entry.obsolete and entry.msgid and (overwrite or not entry.translated()):
            wanted[entry.linenum - 1] = entry
    found, at = [], 0
    while at < len(lines):
        entry = wanted.get(at)
        if entry is None:
            found.append(lines[at])
            at += 1
            continue
        flagged = "fuzzy" in entry.flags
        while at < len(lines) and not MSGSTR.match(lines[at]):
            line = lines[at]
            if not flagged and line.startswith("#,"):
                line, flagged = "#, fuzzy," + line[2:], True
            elif not flagged and line.startswith(("msgctxt", "msgid", "#|")):
                found.append("#, fuzzy" + line_end(line))
                flagged = True
            found.append(line)
            at += 1
        while at < len(lines) and (match := MSGSTR.match(lines[at])):
            plural = match[2] not in (None, "0")
            text = entry.msgid_plural if plural else entry.msgid
            found.append(Message(match[1], text, line_end(lines[at])))
            at += 1
            while at < len(lines) and lines[at].lstrip().startswith('"'):
                at += 1
    return found


def line_end(line):
    return line[len(line.rstrip("\r\n")) :] or "\n"
