"""XML as a tree of nodes with byte offsets, so that untranslated parts can be copied byte for byte. Python's expat
parses the document; it expands no entities and reads no external ones."""

import re
from bisect import bisect_left
from html import unescape
from xml.parsers import expat

from .segments import Place, Segment

DEEPEST = 250
MOST, DENSEST = (
    100_000,
    20,
)  # a document of N bytes may have MOST + N / DENSEST elements, which bounds the tree's memory
ATTRIBUTE = re.compile(r"(?<![^\s\"'])([^\s=\"']+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')")
NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


class Text:
    __slots__ = "begin", "end", "pieces", "cdata"

    def __init__(self, begin, text, cdata):
        self.begin, self.end, self.pieces, self.cdata = begin, begin, text, cdata

    @property
    def text(self):
        return self.pieces if isinstance(self.pieces, str) else "".join(self.pieces)

    def add(self, text):
        if isinstance(self.pieces, str):
            self.pieces = [self.pieces]
        self.pieces.append(text)


class Node:
    """An element with content [inside, inside_end). name: as written, including the prefix, or "" for a reference to an
    entity that the document declares. `data` is the document, from which the attributes are read when needed."""

    __slots__ = "name", "data", "begin", "inside", "inside_end", "end", "parent", "children"

    def __init__(self, name, data, begin, parent):
        self.name, self.data, self.begin, self.parent = name, data, begin, parent
        self.inside = self.inside_end = self.end = begin
        self.children = ()

    @property
    def attributes(self):
        tag = self.data[self.begin : self.inside].decode("utf-8")
        return {match[1]: value_of(match) for match in ATTRIBUTE.finditer(tag, len(self.name) + 1)}

    def add(self, child):
        if not self.children:
            self.children = []
        self.children.append(child)

    def nodes(self, name=None):
        """Yield all descendant elements in document order."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node is not self and (name is None or node.name == name):
                yield node
            waiting += [child for child in reversed(node.children) if isinstance(child, Node)]

    def child(self, name):
        return next((node for node in self.children if isinstance(node, Node) and node.name == name), None)

    def text(self):
        return "".join(child.text for child in self.children if isinstance(child, Text))


class Tree:
    def __init__(self, data, numbered=True):
        """Parse `data`, str or UTF-8 bytes. numbered: record the line numbers of segments."""
        self.numbered = numbered
        self.data = data.encode("utf-8") if isinstance(data, str) else data
        elements = self.data.count(b"<") - self.data.count(b"</")
        if elements > MOST + len(self.data) // DENSEST:
            raise ValueError(f"too many elements: {elements} in {len(self.data)} bytes")
        self.root, self.starts = (
            Node("", self.data, 0, None),
            [],
        )  # starts: (node, key) of each offset for last() to set
        self.at, self.depth, self.cdata, self.lines = self.root, 0, False, []
        self.parser = parser = expat.ParserCreate("utf-8" if isinstance(data, str) else None)
        parser.StartElementHandler, parser.EndElementHandler = self.start, self.end
        parser.CharacterDataHandler, parser.DefaultHandler = self.characters, self.other
        parser.StartCdataSectionHandler = lambda: self.section(True)
        parser.EndCdataSectionHandler = lambda: self.section(False)
        parser.EntityDeclHandler = self.declared
        try:
            parser.Parse(self.data, True)
        except expat.ExpatError as error:
            raise ValueError(f"not well-formed XML: {error}") from None
        self.last(len(self.data))
        self.root.inside_end = self.root.end = len(self.data)

    def last(self, begin):
        """Set the end of the last text or tag to the start of the next event."""
        for node, key in self.starts:
            setattr(node, key, begin)
        self.starts = []

    def start(self, name, attributes):
        begin = self.parser.CurrentByteIndex
        self.last(begin)
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"elements nested more than {DEEPEST} deep")
        node = Node(name, self.data, begin, self.at)
        self.at.add(node)
        self.at = node
        self.starts = [(node, "inside")]

    def end(self, name):
        begin = self.parser.CurrentByteIndex
        self.last(begin)
        self.at.inside_end = max(begin, self.at.inside)
        self.starts = [(self.at, "end")]
        self.at = self.at.parent
        self.depth -= 1

    def characters(self, text):
        begin = self.parser.CurrentByteIndex
        children = self.at.children
        if children and isinstance(children[-1], Text) and (children[-1], "end") in self.starts:
            children[-1].add(text)
            return
        self.last(begin)
        self.at.add(Text(begin, text, self.cdata))
        self.starts = [(self.at.children[-1], "end")]

    def section(self, begins):
        self.last(self.parser.CurrentByteIndex)
        self.cdata = begins

    def other(self, data):
        begin = self.parser.CurrentByteIndex
        self.last(begin)
        if data.startswith("&"):
            self.at.add(Node("", self.data, begin, self.at))
            self.starts = [(self.at.children[-1], "end")]

    def declared(self, name, parameter, value, base, system, public, notation):
        if parameter or system or value is None or "&" in value or "%" in value or len(value) > 1000:
            raise ValueError(f"unsupported entity declaration {name!r}")

    def raw(self, begin, end):
        return self.data[begin:end].decode("utf-8")

    def tag(self, node):
        return self.raw(node.begin, node.inside)

    def spliced(self, begin, end, changes):
        """Return the parts of [begin, end); each (begin, end, parts) in `changes` replaces a range."""
        found = []
        for low, high, parts in sorted(changes, key=lambda change: change[0]):
            found += [self.raw(begin, low), *parts]
            begin = high
            if self.numbered:
                for part in parts:
                    if isinstance(part, Segment):
                        part.place = f"line {self.line(low)}"
                found.append(Place(self.line(high)))
        return [*found, self.raw(begin, end)]

    def line(self, at):
        if not self.lines:
            self.lines = [match.start() for match in re.finditer(b"\n", self.data)] or [len(self.data)]
        return bisect_left(self.lines, at) + 1


def escape(text):
    """Encode text; drop the characters that XML forbids."""
    text = NOT_XML.sub("", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def quoted(text):
    """Encode text for an attribute in double quotes."""
    return re.sub(r"[\t\n\r]", lambda match: f"&#{ord(match[0])};", escape(text).replace('"', "&quot;"))


def value_of(match):
    """Return the decoded value of an attribute that ATTRIBUTE found."""
    return unescape(re.sub(r"\r\n|[\t\r\n]", " ", match[2] or match[3] or ""))


def attribute_parts(tag, translated):
    """Return the parts of a start tag, [] if it does not change. translated(name, value) returns the parts of a value,
    [] if it does not change."""
    parts, last = [], 0
    for match in ATTRIBUTE.finditer(tag, re.match(r"<[^\s/>]*", tag).end()):
        if value := translated(match[1], value_of(match)):
            parts += [tag[last : match.end(1)], '="', *value, '"']
            last = match.end()
    return [*parts, tag[last:]] if parts else []


def with_attribute(tag, name, value):
    """Return a start tag after setting an attribute."""
    pattern = rf"(\s{re.escape(name)}\s*=\s*)(\"[^\"]*\"|'[^']*')"
    if re.search(pattern, tag):
        return re.sub(pattern, lambda match: f'{match[1]}"{value}"', tag, count=1)
    inside = tag.removesuffix(">").removesuffix("/").rstrip()
    return f'{inside} {name}="{value}"{tag[len(inside) :]}'


def opening(tag):
    """Return the start tag of an element; convert an empty-element tag to a start tag."""
    return tag[:-2].rstrip() + ">" if tag.endswith("/>") else tag
