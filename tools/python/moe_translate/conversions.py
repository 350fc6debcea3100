"""Placeholders (%s, {name}), tags, addresses and accelerator keys (&File) of a text, all of which a translation must
contain."""

import re
from collections import Counter

# Accelerator keys: matches &File, Save &As, _Open and E_xit, but not R&D, file_name or &amp;
KEY = re.compile(
    r"(?:(?<![A-Z&])(?=&)|(?<![^\s(])(?=_)|(?<=[A-Z])(?=_[a-z])|(?<=[A-Z][a-z])(?=_[a-z]))([&_])([^\W\d_])(?!\w*[;_])"
)

# Placeholders by the message's flag, such as c-format; ANY is for messages without a flag.
C = (
    r"%(?:\d+\$)?[-+ #0'I]*(?:\*|[1-9]\d*)?(?:\.(?:\*|\d+)?)?(?:hh|h|ll|l|L|q|j|z|t)?"
    r"(?:[diouxXeEfFgGaAcCsSpnm@%]|<PRI\w+>)"
)
PYTHON = r"%(?:\([^()]*\))?[-+ #0]*(?:\*|[1-9]\d*)?(?:\.(?:\*|\d+)?)?[hlL]?[diouxXeEfFgGcrsa%]"
BRACES = r"\{[^{}\s]*\}"
NAMED = r"%\([^()]*\)[-+ #0-9.]*[a-zA-Z]|%<[^<>]*>[-+ #0-9.]*[a-zA-Z]"
FORMATS = {
    "c-format": C,
    "objc-format": C,
    "gcc-internal-format": C,
    "gfc-internal-format": C,
    "php-format": C,
    "perl-format": C,
    "lua-format": C,
    "sh-format": r"\$\w+|\$\{\w+\}",
    "python-format": PYTHON,
    "ruby-format": PYTHON + "|" + NAMED,
    "python-brace-format": r"\{\{|\}\}|\{[^{}]*\}",
    "perl-brace-format": BRACES,
    "c++-format": BRACES,
    "csharp-format": BRACES,
    "java-format": BRACES,
    "java-printf-format": C,
    "qt-format": r"%L?\d+|%n",
    "qt-plural-format": r"%L?\d+|%n",
    "kde-format": r"%\d+",
    "kde-kuit-format": r"%\d+",
    "boost-format": C + r"|%\d+%|%\|[^|]*\|",
    "javascript-format": C,
}
ANY = "|".join(
    (
        r"\{\{[^{}]*\}\}",
        NAMED,
        r"%(?:\d+\$)?[-.0-9]*l{0,2}[sdiufxc@](?![a-zA-Z])",
        r"%\d+\b",
        r"\{\w*\}",
        r"\$\{\w+\}",
        r"\$[a-zA-Z_]\w*\$?",  # $COUNT$ in browser extensions
        r"\\[nrt]",  # line breaks written as \n
    )
)
# Translations in every format must contain these: tags, plain or escaped as in XML, and addresses
MARKUP = r"</?[a-zA-Z][^<>]*>|&lt;/?[a-zA-Z](?:(?!&[lg]t;).)*&gt;|https?://[^\s<>\"'&]*[\w/]"


def conversions(text, flags):
    """Return a text's placeholders as a Counter, and a list of those that consume the next argument, in order."""
    named = [FORMATS[flag] for flag in flags if flag in FORMATS]
    found = [match[0] for form in [*(named or [ANY]), MARKUP] for match in re.finditer(form, text)]
    counting = [form for form in found if re.match(r"%[^%\d(<]*[a-zA-Z]|%\d+[a-zA-Z]|\{\}", form)]
    return Counter(found), counting


def same_conversions(source):
    """Return a `check` for a Segment, which tests whether a translation has the placeholders of `source`."""
    wanted = conversions(source, ())
    return lambda raw: conversions(raw, ()) == wanted


def prose(text):
    """Return whether a value reads like text, unlike user_id, app.title, /a/b, #fff, btnOk or a@b.c."""
    word = text.strip()
    if not re.search(r"[^\W\d_]", word):
        return False
    return bool(re.search(r"\s", word)) or not re.search(r"[_/\\@#<>=]|\w[.:]\w|\d[^\W\d_]|[a-z][A-Z]|://", word)
