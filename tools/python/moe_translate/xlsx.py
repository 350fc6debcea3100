"""Workbooks (.xlsx): cells with text, notes, headers and footers, messages of data validation, text boxes and chart
titles. Formulas, numbers, dates and names of sheets and
ranges do not change, nor do cells with a value that a formula, filter, list or pivot table contains. The columns of a
table are renamed with their headings, unless formulas, queries or pivot tables may refer to them."""

import re
from collections import Counter
from functools import partial
from html import unescape

from . import ooxml
from .conversions import prose
from .pptx import DRAWINGS
from .segments import Mark, Segment
from .text import paired
from .xmltree import Tree, attribute_parts, escape, quoted

FORMULA = re.compile(
    r"<(?:\w+:)?(?:f|formula[12]?|definedName|calculatedColumnFormula|totalsRowFormula)(?:\s[^<>]*)?>([^<]*)<"
)
LITERAL = re.compile(r'"((?:[^"]|"")*)"')
VALUE = re.compile(
    r"<(?:\w+:)?(?:(?:filter|customFilter)\s[^<>]*?\bval|cacheField\s[^<>]*?\bname|s\s[^<>]*?\bv"
    r"|cfRule\s[^<>]*?\btext)=\"([^\"]*)\""
)
LABEL = re.compile(r"(<(?:\w+:)?tableColumn\s[^<>]*?\btotalsRowLabel=\")([^\"]*)")
COLUMN = re.compile(r"(<(?:\w+:)?tableColumn\s[^<>]*?\bname=\")([^\"]*)")
REFERS = re.compile(r"xl/(?:pivotCache|queryTables|model|connections)")
LONGEST_NAME = 255  # maximum characters of a column's name in Excel
WITH_VALUES = re.compile(r"xl/(?:workbook\.xml$|worksheets/|tables/|pivotCache/\w*Definition)")
TEXTS = re.compile(  # in sheets: inline strings; tags with LIMITS; headers and footers
    r"<((?:\w+:)?is)\b[^<>/]*>.*?</\1\s*>|<(?:\w+:)?(?:dataValidation|hyperlink)\s[^<]*"
    r"|(?P<header><(?:\w+:)?(?:odd|even|first)(?:Header|Footer)\b[^<>]*>)(?P<text>[^<]*)",
    re.S,
)
# Maximum characters that Excel accepts in the attributes of messages, and in a header
LIMITS = {"promptTitle": 32, "prompt": 255, "errorTitle": 32, "error": 255, "tooltip": 255}
LONGEST_HEADER = 255
LINE = re.compile(r"([\t\r\n]+|_x[0-9A-Fa-f]{4}_)")
CODE = re.compile(r"(&(?:\"[^\"]*\"|\d+|K(?:[0-9A-Fa-f]{6}|\d\d[-+]\d{3})|[PN](?:[-+]\d+)?|.))", re.S)  # in headers


def values_of(archive):
    """Return the texts, in lower case, that must not change in shared strings, and those that must not change in inline
    strings, because formulas, filters, lists or columns contain them. Columns of tables follow their headings if these
    are shared strings and nothing may refer to the columns."""
    found, columns, fixed = set(), set(), any(map(REFERS.match, archive.names))
    for name in archive.names:
        text = archive.text(name) if WITH_VALUES.match(name) else ""
        for formula in FORMULA.findall(text):
            fixed = fixed or "[" in formula
            for literal in LITERAL.findall(unescape(formula)):
                found |= {literal, *literal.split(",")}
        found.update(map(unescape, VALUE.findall(text)))
        columns.update(unescape(column) for _, column in COLUMN.findall(text))
    found, columns = ({value.strip().lower() for value in values} for values in (found, columns))
    return found | (columns if fixed else set()), found | columns


# ---- Columns of tables -------------------------------------------------


def heading(name):
    """Return the text of a column's heading cell."""
    return unescape(name).replace("_x000a_", "\n")


def renamed(names, texts):
    """Return the new names of a table's columns, or None if some would be equal, empty or too long. texts: {heading:
    translation}."""
    new = [texts.get(heading(name), heading(name)) for name in names]
    if len({name.lower() for name in new}) < len(new) or not all(0 < len(name) <= LONGEST_NAME for name in new):
        return None
    return list(map(written, new))


def written(name):
    return escape(name).replace('"', "&quot;").replace("\n", "_x000a_")


def shown(node):
    """Return the text of a string without its phonetic hints."""
    return "".join(at.text() for at in node.nodes() if at.name.endswith("t") and not at.parent.name.endswith("rPh"))


def strings_in(tree):
    return [node for node in tree.root.nodes() if node.name.endswith("si") and node.parent.name.endswith("sst")]


def rename_columns(flow, member, changed):
    """Rename the columns of tables like their headings, which are shared strings of `member`. If names would be equal,
    empty or too long, restore the headings. changed: {member: translated bytes}."""
    archive = flow.archive
    tables = {name: archive.text(name) for name in archive.names if re.match(r"xl/tables/[^/]+\.xml$", name)}
    if member not in changed or not tables:
        return
    names = {table: [name for _, name in COLUMN.findall(text)] for table, text in tables.items()}
    old, new = archive.tree(member), Tree(changed[member], numbered=False)
    pairs = list(paired(strings_in(old), strings_in(new)))
    headings, done, kept = {heading(name) for columns in names.values() for name in columns}, {}, set()
    headings |= {heading(label) for text in tables.values() for _, label in LABEL.findall(text)}
    for source, translation in pairs:
        text = shown(source)
        if text in headings and done.setdefault(text, shown(translation)) != shown(translation):
            kept.add(text)  # translated differently in another format
    while True:
        done |= {text: text for text in kept}
        clashes = {heading(name) for columns in names.values() if not renamed(columns, done) for name in columns}
        if clashes & done.keys() <= kept:
            break
        kept |= clashes & done.keys()
    if kept:
        flow.named += sorted(kept)
        back = [(b.begin, b.end, [old.raw(a.begin, a.end)]) for a, b in pairs if shown(a) in kept]
        changed[member] = "".join(new.spliced(0, len(new.data), back)).encode("utf-8")
    for table, text in tables.items():
        columns = iter(renamed(names[table], done) or names[table])
        text = COLUMN.sub(lambda match: match[1] + next(columns), text)
        labels = {label: done.get(heading(label)) or heading(label) for _, label in LABEL.findall(text)}
        changed[table] = LABEL.sub(lambda match: match[1] + written(labels[match[2]]), text).encode("utf-8")


class Strings(ooxml.Part):
    """Shared strings, or the string of a cell."""

    dropped = {"rPh", "phoneticPr"}
    template = '<r>{}<t xml:space="preserve">{}</t></r>'
    splits = re.compile(r"((?:_x000D_)?\n|[\t\u2028\u2029]|_x[0-9A-Fa-f]{4}_)")

    def __init__(self, flow, name, target, tree=None):
        self.tree, self.flow, self.target, self.right = tree or flow.archive.tree(name), flow, target, False
        root = next(self.tree.root.nodes()).name
        self.prefix = root[: root.find(":") + 1]
        self.dropped = {self.prefix + name for name in self.dropped}
        self.template = re.sub(r"(</?)", rf"\1{self.prefix}", self.template)
        self.inline, self.names = tree is not None, set()
        if "values" not in flow.shared:
            flow.shared["values"] = values_of(flow.archive)
        if not tree:
            flow.after.append(lambda changed: rename_columns(flow, name, changed))

    def is_paragraph(self, node):
        return node.name in (self.prefix + "si", self.prefix + "is")

    def is_value(self, text):
        """Return whether formulas, filters or tables refer to a text."""
        return text in self.flow.shared["values"][self.inline]

    def paragraph(self, node):
        texts = [text.text() for text in node.nodes(self.prefix + "t") if text.parent.name != self.prefix + "rPh"]
        text, only = "".join(texts), node.child(self.prefix + "t")
        if not prose(text):
            return []
        if self.is_value(text.strip().lower()):
            self.flow.named.append(text.strip())
            return []
        if not only:
            return super().paragraph(node)
        node.children = ()  # as in ooxml
        lines = (
            escape(part) if number % 2 or part.strip() in self.names else Segment([part], escape)
            for number, part in enumerate(self.splits.split(text))
        )
        return [(node.inside, node.inside_end, [f'<{only.name} xml:space="preserve">', *lines, f"</{only.name}>"])]


class Notes(Strings):
    """Notes of cells, which often begin with the author's name. Threaded comments remain."""

    def __init__(self, flow, name, target):
        super().__init__(flow, name, target, flow.archive.tree(name))
        self.names = {author.text().strip() + ":" for author in self.tree.root.nodes(self.prefix + "author")}

    def is_paragraph(self, node):
        return node.name == self.prefix + "text"

    def is_kept(self, node):
        return self.is_paragraph(node) and any(at.text().startswith("[Threaded comment]") for at in node.nodes())

    def is_value(self, text):
        return False

    def spoken(self, node):
        return super().spoken(node) and node.text().strip() not in self.names


# ---- Sheets ------------------------------------------------------------


def fits(limit, text):
    """Return whether Excel counts at most `limit` characters in an encoded text."""
    return len(unescape(text).encode("utf-16-le")) <= 2 * limit


def message(text, limit):
    """Return the parts of an attribute, [] if it is no text. Its lines share the limit."""
    shares = ((part, limit * len(part) // len(text)) for part in LINE.split(text)) if prose(text) else ()
    return [
        quoted(part) if LINE.fullmatch(part) else Segment([part], quoted, partial(fits, share))
        for part, share in shares
        if part
    ]


def header(text):
    """Return the parts of a header or footer: a segment per line of its sections, which &L, &C and &R begin."""
    parts, items, begin = [], [], 0
    tokens = [token for at, part in enumerate(CODE.split(text)) for token in ([part] if at % 2 else LINE.split(part))]
    for at, token in enumerate([*tokens, "&L"]):
        if token not in ("&L", "&C", "&R") and not LINE.fullmatch(token):
            items.append(header_item(token, items))
            continue
        line, end = "".join(tokens[begin:at]), escape(token) if at < len(tokens) else ""
        spoken = prose(" ".join(item for item in items if isinstance(item, str)))
        share = LONGEST_HEADER * len(line) // max(1, len(text))
        parts += [Segment(items, ampersands, partial(same_codes, line, share)) if spoken else escape(line), end]
        items, begin = [], at + 1
    return parts


def header_item(token, items):
    """Return the text or mark of a code. Codes of fields are words, others formats or pictures."""
    if not CODE.fullmatch(token) or token == "&&":
        return token.replace("&&", "&")
    letter = token[1]
    if letter in "BIUSEXYOH":  # on or off
        last = next((item for item in reversed(items) if isinstance(item, Mark) and item.code == letter), None)
        return Mark(escape(token), "close" if last and last.kind == "open" else "open", code=letter)
    return Mark(escape(token), "word" if letter in "PNDTFAZ" else "single" if letter == "G" else "begin")


def ampersands(text):
    return escape(text.replace("&", "&&"))


def same_codes(line, share, raw):
    """Return whether a translation has the codes of a header's line, and a length that Excel accepts."""
    return fits(share, raw) and Counter(CODE.findall(unescape(raw))) == Counter(CODE.findall(line))


class Sheet:
    """A sheet, whose cells may contain strings. No tree is built, because sheets have many cells."""

    def __init__(self, flow, name, target):
        self.flow, self.name, self.target = flow, name, target

    def parts(self):
        text, found, last = self.flow.archive.text(self.name), [], 0
        for match in TEXTS.finditer(text):
            if parts := self.changed(match):
                found += [text[last : match.start()], *parts]
                last = match.end()
        return [*found, text[last:]] if found else []

    def changed(self, match):
        """Return the parts of a match of TEXTS, [] if it does not change."""
        if match[1]:
            return Strings(self.flow, "", self.target, Tree(match[0], numbered=False)).parts()
        if match["header"]:
            parts = header(unescape(match["text"]))
            return [match["header"], *parts] if any(isinstance(part, Segment) for part in parts) else []
        return attribute_parts(match[0], lambda name, text: message(text, LIMITS[name]) if name in LIMITS else [])


def unpack(data, target=None):
    return ooxml.unpack(data, KINDS, "a workbook", target)


KINDS = {".sharedStrings": Strings, ".comments": Notes} | dict.fromkeys((".worksheet", ".chartsheet"), Sheet) | DRAWINGS
