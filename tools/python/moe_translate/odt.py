"""OpenDocument texts and slides (.odt, .odp): paragraphs and headings, including those in tables, headers, footers,
notes and frames. Spans, links and the two codes of a bookmark, reference, annotation or change are marks; fields stand
for words. Deletions, annotations, fields and code are not translated. odfpy is not used, because it rewrites all
XML."""

import re

from .archive import Archive, Flow
from .docx import refuse_entities
from .segments import Mark, Segment, has_word
from .xmltree import Node, Text, Tree, escape

PARAGRAPHS = {"text:p", "text:h"}
PAIRS = {"text:span", "text:a", "text:meta", "text:ruby", "text:ruby-base"}
RANGE = re.compile(r"(text:(?:[a-z-]*mark|change)|office:annotation)(?:-(start|end))?$")
BREAKS = {"text:tab", "text:line-break"}
KEPT = {
    "text:tracked-changes",
    "office:annotation",
    "office:scripts",
    "office:forms",
    "math:math",
    "office:automatic-styles",
}
CODE = re.compile(r"source|preformatted|code|verbatim|teletype", re.I)


class Part:
    def __init__(self, text, flow):
        self.tree, self.flow = Tree(text), flow
        styles = {
            style.attributes.get("style:name"): style.attributes.get("style:parent-style-name") or ""
            for style in self.tree.root.nodes("style:style")
        }
        self.code = {name for name, parent in styles.items() if name and CODE.search(name + " " + parent)}

    def parts(self):
        return self.tree.spliced(0, len(self.tree.data), self.changes(self.tree.root))

    def changes(self, node):
        """Return the changes to the outermost paragraphs below `node`."""
        found, waiting = [], [node]
        while waiting:
            at = waiting.pop()
            if at.name in KEPT:
                continue
            if at.name in PARAGRAPHS and at is not node:
                found += self.paragraph(at)
            else:
                waiting += [child for child in reversed(at.children) if isinstance(child, Node)]
        return found

    def object(self, node):
        changes = self.changes(node)
        raw = self.flow.put(self.tree.spliced(node.begin, node.end, changes))
        at, match = node.attributes, RANGE.match(node.name)
        code = match and (match[1], at.get("text:name") or at.get("text:id") or at.get("text:change-id"))
        if match and match[1] == "office:annotation":
            code = match[1], at.get("office:name")
        if code and code[1] and (match[2] or match[1] == "office:annotation"):
            return Mark(raw, "close" if match[2] == "end" else "open", code=code)
        shows = not changes and any(has_word(at.text()) for at in (node, *node.nodes()))
        return Mark(raw, "word" if shows else "single")

    def is_code(self, node):
        name = node.attributes.get("text:style-name", "")
        return name in self.code or bool(CODE.search(name))

    def paragraph(self, node):
        chunks = [[]]
        if not self.is_code(node):
            self.visit(node, chunks)
        if not any(isinstance(item, str) and re.search(r"[^\W\d_]", item) for chunk in chunks for item in chunk):
            return [change for child in node.children if isinstance(child, Node) for change in self.changes(child)]
        parts = [part if isinstance(part, str) else Segment(part, escape) for part in chunks]
        return [(node.inside, node.inside_end, parts)]

    def visit(self, node, chunks):
        """Append items to the last chunk; a string separates two chunks."""
        for child in node.children:
            if isinstance(child, Text):
                chunks[-1].append(child.text)
            elif child.name == "text:soft-page-break":
                continue
            elif child.name == "text:s" and child.attributes.get("text:c", "1") == "1":
                chunks[-1].append(" ")
            elif child.name in BREAKS or child.name == "text:s":
                chunks += [self.tree.raw(child.begin, child.end), []]
            elif child.name in PAIRS and child.children and not self.is_code(child):
                chunks[-1].append(Mark(self.tree.tag(child), "open"))
                self.visit(child, chunks)
                chunks[-1].append(Mark(self.tree.raw(child.inside_end, child.end), "close"))
            else:
                chunks[-1].append(self.object(child))


def unpack(data):
    archive = Archive(data)
    flow = Flow(archive)
    for name in ("content.xml", "styles.xml"):
        if name in archive.names:
            text = archive.text(name)
            refuse_entities(text, name)
            flow.member(name, Part(text, flow).parts())
    if not flow.members:
        raise ValueError("not an OpenDocument text")
    return flow.parts(), flow.finish
