"""Workbooks (.xlsx): cells with text, text boxes and chart titles. Formulas, numbers, dates and names of sheets and
ranges do not change, nor do cells with a value that a formula, filter, list or pivot table contains. The columns of a
table are renamed with their headings, unless formulas, queries or pivot tables may refer to them."""

import re
from html import unescape

from . import ooxml
from .conversions import prose
from .pptx import DRAWINGS
from .segments import Segment
from .xmltree import Tree, escape

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
INLINE = re.compile(r"<((?:\w+:)?is)\b[^<>/]*>.*?</\1\s*>", re.S)


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
    pairs = list(zip(strings_in(old), strings_in(new), strict=True))
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
        self.inline = tree is not None
        if "values" not in flow.shared:
            flow.shared["values"] = values_of(flow.archive)
        if not tree:
            flow.after.append(lambda changed: rename_columns(flow, name, changed))

    def is_paragraph(self, node):
        return node.name in (self.prefix + "si", self.prefix + "is")

    def paragraph(self, node):
        texts = [text.text() for text in node.nodes(self.prefix + "t") if text.parent.name != self.prefix + "rPh"]
        text, only = "".join(texts), node.child(self.prefix + "t")
        if not prose(text):
            return []
        if text.strip().lower() in self.flow.shared["values"][self.inline]:
            self.flow.named.append(text.strip())
            return []
        if not only:
            return super().paragraph(node)
        node.children = ()  # as in ooxml
        lines = (
            escape(part) if number % 2 else Segment([part], escape)
            for number, part in enumerate(self.splits.split(text))
        )
        return [(node.inside, node.inside_end, [f'<{only.name} xml:space="preserve">', *lines, f"</{only.name}>"])]


class Sheet:
    """A sheet, whose cells may contain strings. No tree is built, because sheets have many cells."""

    def __init__(self, flow, name, target):
        self.flow, self.name, self.target = flow, name, target

    def parts(self):
        text, found, last = self.flow.archive.text(self.name), [], 0
        for cell in INLINE.finditer(text):
            strings = Strings(self.flow, "", self.target, Tree(cell[0], numbered=False))
            found += [text[last : cell.start()], *strings.parts()]
            last = cell.end()
        return [*found, text[last:]] if found else []


def unpack(data, target=None):
    return ooxml.unpack(data, KINDS, "a workbook", target)


KINDS = {".sharedStrings": Strings, ".worksheet": Sheet} | DRAWINGS
