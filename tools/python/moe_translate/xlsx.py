"""Workbooks (.xlsx): cells with text, text boxes and chart titles. Formulas, numbers, dates, names of sheets,
ranges and columns of tables do not change, nor do cells with a value that a formula, filter, list or pivot table
contains."""

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
    r"<(?:\w+:)?(?:(?:filter|customFilter)\s[^<>]*?\bval|(?:tableColumn|cacheField)\s[^<>]*?\bname|s\s[^<>]*?\bv"
    r"|cfRule\s[^<>]*?\btext)=\"([^\"]*)\""
)
WITH_VALUES = re.compile(r"xl/(?:workbook\.xml$|worksheets/|tables/|pivotCache/\w*Definition)")
INLINE = re.compile(r"<((?:\w+:)?is)\b[^<>/]*>.*?</\1\s*>", re.S)


def values_of(archive):
    """Return the texts, in lower case, that cells share with formulas, filters, lists and column names."""
    found = set()
    for name in archive.names:
        text = archive.text(name) if WITH_VALUES.match(name) else ""
        for formula in FORMULA.findall(text):
            for literal in LITERAL.findall(unescape(formula)):
                found |= {literal, *literal.split(",")}
        found.update(map(unescape, VALUE.findall(text)))
    return {value.strip().lower() for value in found}


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
        if "values" not in flow.shared:
            flow.shared["values"] = values_of(flow.archive)

    def is_paragraph(self, node):
        return node.name in (self.prefix + "si", self.prefix + "is")

    def paragraph(self, node):
        texts = [text.text() for text in node.nodes(self.prefix + "t") if text.parent.name != self.prefix + "rPh"]
        text, only = "".join(texts), node.child(self.prefix + "t")
        if not prose(text):
            return []
        if text.strip().lower() in self.flow.shared["values"]:
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
