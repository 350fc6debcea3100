"""Placeholders (%s, {name}), tags, addresses and accelerator keys (&File) in a text, all of which a translation must
contain."""

import re
from collections import Counter

# Accelerator keys: matches &File, Save &As, _Open and E_xit, but not R&D, file_name or &amp;
KEY = re.compile(
    r"(?:(?<![A-Z&])(?=&)|(?<![^\s(])(?=_)|(?<=[A-Z])(?=_[a-z])|(?<=[A-Z][a-z])(?=_[a-z]))([&_])([^\W\d_])(?!\w*[;_])"
)

# Placeholders by message flag, such as c-format; ANY is for messages without a flag.
C = (
    r"%(?:\d+\$)?[-+ #0'I]*(?:\*|[1-9]\d*)?(?:\.(?:\*|\d+)?)?(?:hh|h|ll|l|L|q|j|z|t)?"
    r"(?:[diouxXeEfFgGaAcCsSpnm@%]|<PRI\w+>)"
)
PYTHON = r"%(?:\([^()]*\))?[-+ #0]*(?:\*|[1-9]\d*)?(?:\.(?:\*|\d+)?)?[hlL]?[diouxXeEfFgGcrsa%]"
BRACES = r"\{[^{}\s]*\}"
NAMED = r"%\([^()]*\)[-+ #0-9.]*[a-zA-Z]|%<[^<>]*>[-+ #0-9.]*[a-zA-Z]"
MAKETEXT = r"\[(?=[^\[\]]*\])(?:_\d+|[^\[\],\s]+(?:,[^\[\]]*)?,_[-*\d][^\[\]]*)\]"
FORMATS = {
    "c-format": C,
    "objc-format": C,
    "gcc-internal-format": C,
    "gfc-internal-format": C,
    "php-format": C,
    "perl-format": C,
    "perl-maketext-format": MAKETEXT,
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
        MAKETEXT,
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


# ---- Notes for translators ---------------------------------------------

# Keys of messages and their notes in browser extensions, FormatJS, Transifex, go-i18n and Hugo
MESSAGE = set("message defaultMessage string translation zero one two few many other".split())
NOTES = set(
    "comment comments context description developer_comment character_limit end example extract file hash id key line "
    "meaning note notes placeholders start tags".split()
)


def noted(keys):
    """Return whether an object with these keys is a message with notes for translators."""
    message = keys & MESSAGE
    return bool(message) and message < keys and keys - message <= NOTES


# ---- Values for programs -----------------------------------------------

LETTER = re.compile(r"[^\W\d_]")
SIGNS = re.compile(rf"{ANY}|{MARKUP}|%[-_0^#:]*[a-zA-Z](?![a-zA-Z])")
NO_WORD = re.compile(r"[_\\@#<>=]|^[.:$/]|^\*\.|://|/.*/|/\*|^(?:text|image|application)/")
NO_ASCII_WORD = re.compile(r"\w[.:]\w|\d[a-zA-Z]|[a-z][A-Z]")
# Date patterns: ICU, Moment and others (EEEE, d MMMM yyyy); strftime (%d.%m.%Y at %H:%M)
QUOTED = re.compile(r"'[^']*'|\[[^\[\]]*\]")
FIELD = re.compile(r"([A-Za-z])\1*|[DdMQwW]o|LTS?|(?:([yYMdDHhmsS])\2+T?){2,}")
LONG_FIELD = re.compile(r"([yMdDHhmsELYw])\1|([yYMdDHhmsS])\2+T?(?=([yYMdDHhmsS])\3)")
FIELDS = set("GyYuQqLMwWDdEecaBhHKkmsSAzZOvVXx")
STRFTIME = re.compile(r"%[-_0^#:]*[a-zA-Z%]")
STRFTIME_ONLY = re.compile(r"%[-_0^#]?[BYAbHMpymIljZPe]")
# Stylesheet values: 2px solid #ccc; rgb(0, 0, 0); Arial, sans-serif
CSS = re.compile(
    r"-?\.?\d[\d.]*(?:[a-z]{1,4}|%)?|#[0-9a-fA-F]{3,8}|[a-z-]+\([^()]*\)|solid|dashed|dotted|auto|none|inset|bold"
    r"|italic|normal|center|left|right|top|bottom|repeat|no-repeat|cover|ease(?:-in)?(?:-out)?|linear|all"
    r"|transparent|and|/"
)
MEASURE = re.compile(r"\d[a-z%]|#[0-9a-fA-F]{3}")
MACHINE = re.compile(
    r"true|false|null|nil|undefined|NaN|nplurals\s*=.*|\^.*\$|[a-z][\w-]*\((?=[^()]*(?:\d|--|:))[^()]*\)"
    r"|.*,\s*(?:sans-serif|serif|monospace|cursive|system-ui)"
    r"|(?:[a-z]+ and )*(?:\([a-z-]+: *[\d.]+[a-z]*\)(?: and )?)+"
)
ENUM = set(
    "id uuid guid slug url uri href src path filename icon image img colour color background align alignment position "
    "direction size kind type variant mode method status state role level theme layout template component route rel "
    "locale lang language charset encoding timezone currency mime format".split()
)
STYLES = set(
    "class classname classnames classes cls icon iconcls style styles css font fontfamily viewbox transform regex "
    "regexp".split()
)
# Words of sentences, which values of styles lack
SPOKEN = set("a an and are be by can for in is it must no not of on or the this to with you".split())
DATES = set("date dates time times datetime format formats pattern patterns".split())


def date_pattern(text, expected):
    """Return whether a text is a date pattern; expected: its key says so, which allows "F j, Y"."""
    marks = STRFTIME.findall(text)
    rest = re.findall(r"[^\W\d_]+", STRFTIME.sub(" ", text))
    if len(marks) > 1 and STRFTIME_ONLY.search(text) and len(rest) < 3 and all(len(word) < 4 for word in rest):
        return True
    bare = QUOTED.sub(" ", text)
    fields = re.findall(r"[^\W\d_]+", bare)
    if not fields or not all(FIELD.fullmatch(word) for word in fields):
        return False
    if expected or bare.isalpha():
        return expected or len(bare) > 2
    return all(FIELDS.issuperset(word) for word in fields if len(word) == 1) and bool(LONG_FIELD.search(bare))


def prose(text, key=""):
    """Return whether a value reads like text, unlike user_id, app.title, /a/b, #fff, btnOk, a@b.c, "%u %n" or
    "EEEE, d MMMM". key: the value's name, because "left" is not text under "align"."""
    value, name = text.strip(), re.findall(r"[A-Z]?[a-z]+|[A-Z]+", key)
    last = [word.lower() for word in name[-2:]]
    words, rest = ([word for word in text.split() if LETTER.search(word)] for text in (value, SIGNS.sub(" ", value)))
    whole = not re.search(r"\s", value)
    coded = all(
        NO_WORD.search(word) or whole and "/" in word or word.isascii() and NO_ASCII_WORD.search(word) for word in rest
    )
    if not rest or coded and (whole or len(words) > 1):
        return False
    if MACHINE.fullmatch(value) or date_pattern(value, not DATES.isdisjoint(last)):
        return False
    if MEASURE.search(value) and all(map(CSS.fullmatch, re.findall(r"[^\s,(]*\([^()]*\)|[^\s,]+", value))):
        return False
    if value.islower() and ("".join(last) in STYLES or last[-1:] and last[-1] in STYLES) and SPOKEN.isdisjoint(words):
        return value.isalpha() and value == last[-1]
    enum = last and last[-1] in ENUM and re.fullmatch(r"[\w-]+", value) and value.lower() != last[-1]
    return not (enum and (value.islower() or value.isupper() or last[-1] == "icon"))
