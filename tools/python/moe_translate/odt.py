"""OpenDocument texts and slides (.odt, .odp): paragraphs and headings, including those in tables, headers, footers,
notes and frames. Spans, links and the two codes of a bookmark, reference, annotation or change are marks; fields and
formulas stand for words. Deletions, annotations, fields and code are not translated. odfpy is not used, because it
rewrites all XML."""

import re

from .archive import Archive, Flow, description
from .inline import deletions_before_words, formulas, plain_ordinals
from .languages import is_asian, locale_of, right_to_left, same_language
from .segments import WORD, Mark, Segment, collapsed, has_word
from .xmltree import Node, Text, escape, with_attribute

PARAGRAPHS = {"text:p", "text:h"}
PAIRS = {"text:span", "text:a", "text:meta"}
RANGE = re.compile(r"(text:(?:[a-z-]*mark|change)|office:annotation)(?:-(start|end))?$")
BREAKS = {"text:tab", "text:line-break", "text:s"}
CHARACTERS = {"text:s": " ", "text:soft-page-break": "", "text:soft-hyphen": "\u00ad"}
KEPT = {
    "text:tracked-changes",
    "office:annotation",
    "office:scripts",
    "office:forms",
    "math:math",
    "office:automatic-styles",
}
LINES = re.compile("([\u2028\u2029])")
CODE = re.compile(r"source|preformatted|code|verbatim|teletype", re.I)


class Sentence(Segment):
    """A paragraph, or a part of it between breaks; raw: the original."""

    def __init__(self, items, raw):
        self.raw = raw
        items = deletions_before_words(items, kind_of, str, lambda item, text: text)
        super().__init__(formulas(collapsed(plain_ordinals(items), escape), escape), escape)

    def original(self):
        return self.raw


def kind_of(item):
    return "text" if isinstance(item, str) else "deletion" if item.name == "text:change" else item.kind


def is_break(atom):
    return atom is None or isinstance(atom, str) or isinstance(atom, Node) and atom.name in BREAKS


def is_space(atom):
    return isinstance(atom, tuple) and atom[0] == " " and atom[1].startswith("<")


class Part:
    def __init__(self, flow, name, target):
        self.tree, self.flow, self.target = flow.archive.tree(name), flow, target
        self.code, self.raised = set(), {}
        for style in self.tree.root.nodes("style:style"):
            at, properties = style.attributes, style.child("style:text-properties")
            name = at.get("style:name", "")
            if CODE.search(name + " " + at.get("style:parent-style-name", "")):
                self.code.add(name)
            position = properties.attributes.get("style:text-position", "") if properties else ""
            if re.match("super|sub|-?[1-9]", position):
                self.raised[name] = "sub" if position[:3] == "sub" or position[0] == "-" else "sup"

    def parts(self):
        return self.tree.spliced(0, len(self.tree.data), self.changes(self.tree.root) + self.languages())

    def languages(self):
        """Return the changes to formats and metadata that name the document language."""
        if not self.target:
            return []
        kind = "-complex" if right_to_left(self.target) else "-asian" if is_asian(self.target) else ""
        key, place = (f"{'style' if kind else 'fo'}:{name}{kind}" for name in ("language", "country"))
        tag = locale_of(self.target)
        language, *region = tag.split("-")
        changes = [(node.inside, node.inside_end, [tag]) for node in self.tree.root.nodes("dc:language")]
        for node in self.tree.root.nodes("style:text-properties"):
            old = node.attributes.get(key)
            if old and same_language(old, self.flow.shared.setdefault("language", old)):
                new = with_attribute(self.tree.tag(node), key, language)
                changes.append((node.begin, node.inside, [with_attribute(new, place, (region or ["none"])[-1])]))
        return changes

    def changes(self, node):
        """Return the changes to the outermost paragraphs below `node` and to alternative texts."""
        found, waiting = [], [node]
        while waiting:
            at = waiting.pop()
            if at.name in KEPT:
                continue
            if at.name in PARAGRAPHS and at is not node:
                found += self.paragraph(at)
            elif at.name in ("svg:title", "svg:desc"):
                parts = description(at.text(), escape)
                found += [(at.inside, at.inside_end, parts)] if parts else []
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
        field = node.name.startswith("text:") and not node.children and not match
        formula = at.get("text:anchor-type") == "as-char" and node.child("draw:object")
        shows = field or formula or not changes and any(has_word(at.text()) for at in (node, *node.nodes()))
        return Mark(raw, "word" if shows else "single", name=node.name)

    def is_code(self, node):
        name = node.attributes.get("text:style-name", "")
        return name in self.code or bool(CODE.search(name))

    def paragraph(self, node):
        atoms = []
        if not self.is_code(node):
            self.visit(node, atoms)
        if not any(isinstance(atom, tuple) and WORD.search(atom[0]) for atom in atoms):
            return [change for child in node.children if isinstance(child, Node) for change in self.changes(child)]
        parts, items, raw = [], [], []
        for atom, after in zip([*atoms, None], [*atoms[1:], None, None]):
            space = is_space(atom) and (not items or is_break(after))  # text:s: a plain space there has no width
            if is_break(atom) or space:
                text = atom[1] if space else atom or ""
                gap = self.tree.raw(atom.begin, atom.end) if isinstance(atom, Node) else text
                parts += [Sentence(items, "".join(raw)), gap]
                items, raw = [], []
                continue
            atom = self.object(atom) if isinstance(atom, Node) else atom
            items.append(atom if isinstance(atom, Mark) else atom[0])
            raw.append(atom.raw if isinstance(atom, Mark) else atom[1])
        node.children = ()  # frees the memory of the tree
        return [(node.inside, node.inside_end, parts)]

    def visit(self, node, atoms):
        """Append texts with their markup, line separators, marks, and other elements, which end a sentence or become
        objects."""
        for child in node.children:
            if isinstance(child, Text):
                for part in LINES.split(child.text):
                    atoms.append(part if LINES.fullmatch(part) else (part, escape(part)))
            elif child.name in CHARACTERS and child.attributes.get("text:c", "1") == "1":
                atoms.append((CHARACTERS[child.name], self.tree.raw(child.begin, child.end)))
            elif base := child.child("text:ruby-base"):  # the reading belongs to the closing mark
                atoms.append(Mark(self.tree.raw(child.begin, base.inside), "open"))
                self.visit(base, atoms)
                atoms.append(Mark(self.tree.raw(base.inside_end, child.end), "close"))
            elif child.name in PAIRS and child.children and not self.is_code(child):
                name = self.raised.get(child.attributes.get("text:style-name"), "")
                atoms.append(Mark(self.tree.tag(child), "open", name=name))
                self.visit(child, atoms)
                atoms.append(Mark(self.tree.raw(child.inside_end, child.end), "close"))
            else:
                atoms.append(child)


def unpack(data, target=None):
    archive = Archive(data)
    flow = Flow(archive)
    names = [name for name in ("styles.xml", "content.xml", "meta.xml") if name in archive.names]
    if "content.xml" not in names:
        raise ValueError("not an OpenDocument text: content.xml is missing")
    for name in names:
        parts = Part(flow, name, target).parts()
        if name != "meta.xml" or len(parts) > 1:
            flow.member(name, parts)
    return flow.parts(), flow.finish
