"""Word documents (.docx): paragraphs of the text, tables, headers, footers, notes and text boxes. Each paragraph is a
segment; the formats of runs, links, fields, bookmarks and ranges of comments are marks. Tracked insertions are
translated. Deletions, code (styles named Verbatim, Code, Source), formulas and merge fields are not. python-docx is not
used, as it rewrites many parts."""

import re
from collections import Counter

from .archive import Archive, Flow
from .languages import right_to_left
from .segments import WORD, Mark, Segment, has_word
from .xmltree import Node, Text, Tree, escape

KINDS = ("document.main", "template.main", "document.macroEnabled.main", "header", "footer", "footnotes", "endnotes")
CONTAINERS = set("hyperlink ins moveTo smartTag fldSimple sdt customXml dir bdo".split())
SHOWN = {"w:t", "m:t"}
DROPPED = {"w:proofErr", "w:lastRenderedPageBreak"}  # traces of Word's last proofreading and layout
BREAKS = {"w:tab", "w:br", "w:cr", "w:ptab"}
CODE = re.compile(r"verbatim|source|code|preformatted|listing", re.I)
FIELDS = re.compile(r"\s*(?:MERGEFIELD|ADDIN|FILENAME|AUTHOR|DATE|TIME|DOCPROPERTY|CITATION|EQ|SYMBOL|FORM\w+)\b")
RANGE = re.compile(r"w:(bookmark|commentRange|perm|(?:move(?:From|To)|customXml\w+)Range)(Start|End)$")
OBJECTS = {"object", "word"}
FIELD_CODES = {"begin": "open", "separate": "separate", "end": "close"}
LANGUAGE = re.compile(r"<w:lang\b[^>]*/>|<w:noProof\s*/>")
SIGN = re.compile("(\x01\\d+\x02|\x03\\d+\x04|\x03/\x04)")
AFTER_BIDI = re.compile(
    r"<w:(?:adjustRightInd|snapToGrid|spacing|ind|contextualSpacing|mirrorIndents|suppressOverlap|jc|textDirection"
    r"|textAlignment|textboxTightWrap|outlineLvl|divId|cnfStyle|rPr|sectPr|pPrChange)\b|</w:pPr>"
)
AFTER_RTL = re.compile(r"<w:(?:cs|em|lang|eastAsianLayout|specVanish|oMath|rPrChange)\b|</w:rPr>")


class Sentence(Segment):
    """A paragraph, or a part of a paragraph between breaks; formats: properties of its runs, most frequent first."""

    def __init__(self, items, formats):
        self.formats = formats
        super().__init__(items, escape)

    def _whole(self, raw):
        out, stack = [], [0]
        for piece in SIGN.split(super()._whole(raw)):
            if piece.startswith("\x01"):
                out.append(piece)
            elif piece == "\x03/\x04":
                stack = stack[:-1] or [0]
            elif piece.startswith("\x03"):
                stack.append(int(piece[1:-1]))
            elif piece:
                out.append(f'<w:r>{self.formats[stack[-1]]}<w:t xml:space="preserve">{piece}</w:t></w:r>')
        return "".join(out)


class Part:
    def __init__(self, text, flow, right):
        self.tree, self.flow, self.right, self.fields = Tree(text), flow, right, []

    def parts(self):
        root = self.tree.root
        return self.tree.spliced(0, len(self.tree.data), self.changes(root))

    def changes(self, node):
        """Return the changes to the outermost paragraphs below `node`."""
        found, waiting = [], [node]
        while waiting:
            at = waiting.pop()
            if at.name == "w:p" and at is not node:
                found += self.paragraph(at)
            else:
                waiting += [child for child in reversed(at.children) if isinstance(child, Node)]
        return found

    def object(self, node, before="", after=""):
        changes = self.changes(node)
        shows = not changes and any(map(has_word, (at.text() for at in (node, *node.nodes()) if at.name in SHOWN)))
        raw = self.flow.put([before, *self.tree.spliced(node.begin, node.end, changes), after])
        return "word" if shows else "object", raw

    def paragraph(self, node):
        properties = node.child("w:pPr")
        style = next(properties.nodes("w:pStyle"), None) if properties else None
        atoms = []
        if not (style and CODE.search(style.attributes.get("w:val", ""))):
            self.visit(node, atoms)
        if not any(kind == "text" and re.search(r"[^\W\d_]", text) for kind, text, *_ in atoms):
            return [change for child in node.children if isinstance(child, Node) for change in self.changes(child)]
        begin = properties.end if properties else node.inside
        changes = [(begin, node.inside_end, self.sentences(atoms))]
        if self.right:
            raw = self.tree.raw(properties.begin, properties.end) if properties else "<w:pPr></w:pPr>"
            raw = re.sub(r"^<w:pPr\s*/>$", "<w:pPr></w:pPr>", raw)
            if "<w:bidi" not in raw:
                raw = AFTER_BIDI.sub(lambda match: "<w:bidi/>" + match[0], raw, count=1)
            changes = [(properties.begin if properties else begin, begin, [raw]), *changes]
        return changes

    def visit(self, node, atoms):
        for child in node.children:
            if isinstance(child, Text) or child.name == "w:pPr" or child.name in DROPPED:
                continue
            if child.name == "w:r":
                self.run(child, atoms)
                continue
            inner = child.child("w:sdtContent") if child.name == "w:sdt" else child
            if child.name[2:] in CONTAINERS and inner and self.speaks(child):
                atoms.append(("open", self.flow.put([self.tree.raw(child.begin, inner.inside)])))
                self.visit(inner, atoms)
                atoms.append(("close", self.flow.put([self.tree.raw(inner.inside_end, child.end)])))
            elif match := RANGE.match(child.name):
                code = match[1], child.attributes.get("w:id")
                atoms.append(("open" if match[2] == "Start" else "close", self.object(child)[1], code))
            else:
                atoms.append(self.object(child))

    def speaks(self, node):
        if FIELDS.match(node.attributes.get("w:instr", "")):
            return False
        return any(at.name == "w:t" for at in node.nodes()) and not any(at.name == "w:p" for at in node.nodes())

    def run(self, node, atoms):
        properties = node.child("w:rPr")
        raw = LANGUAGE.sub("", self.tree.raw(properties.begin, properties.end)) if properties else ""
        raw = "" if raw == "<w:rPr></w:rPr>" else raw
        style = next(properties.nodes("w:rStyle"), None) if properties else None
        kept = bool(style and CODE.search(style.attributes.get("w:val", "")))
        tag, end = self.tree.tag(node), "</w:r>"
        old = self.tree.raw(properties.begin, properties.end) if properties else ""
        for child in node.children:
            if isinstance(child, Text) or child is properties or child.name in DROPPED:
                continue
            self.field(child)
            kind = FIELD_CODES.get(child.attributes.get("w:fldCharType")) if child.name == "w:fldChar" else None
            if kind:
                atoms.append((kind, self.object(child, tag + old, end)[1], "field"))
            elif child.name == "w:t" and not kept and not any(FIELDS.match(field) for field in self.fields):
                atoms.append(("text", child.text(), raw))
            elif child.name in BREAKS and not self.fields:
                atoms.append(("break", self.object(child, tag + old, end)[1]))
            else:
                atoms.append(self.object(child, tag + old, end))

    def field(self, node):
        """Track complex fields, whose instructions precede the text in separate runs."""
        if node.name == "w:fldChar":
            kind = node.attributes.get("w:fldCharType")
            if kind == "begin":
                self.fields.append("")
            elif kind == "end" and self.fields:
                self.fields.pop()
        elif node.name == "w:instrText" and self.fields:
            self.fields[-1] += node.text()

    def joined(self, atoms):
        """Join the codes of each field. A field whose result has no text to translate becomes a word, or an object if it
        shows nothing."""
        found, begins = [], []
        for atom in atoms:
            kind, *_, code = atom
            if code != "field":
                found.append(atom)
            elif kind == "open":
                begins.append(len(found))
                found.append(atom)
            elif not begins:  # begins in an earlier paragraph
                found.append(("object" if kind == "separate" else kind, *atom[1:]))
            elif kind == "separate":
                found[begins[-1] :] = [("open", self.raw([*found[begins[-1] :], atom]), code)]
            else:
                begin = begins.pop()
                texts = [text for what, text, *_ in found[begin:] if what == "text"]
                if any(map(WORD.search, texts)):
                    found.append(atom)
                    continue
                shows = any(map(has_word, texts)) or any(what == "word" for what, *_ in found[begin:])
                found[begin:] = [("word" if shows else "object", self.raw([*found[begin:], atom]))]
        return found

    def raw(self, atoms):
        """Write atoms as one object."""
        return "".join(
            self.flow.put([f'<w:r>{atom[2]}<w:t xml:space="preserve">{escape(atom[1])}</w:t></w:r>'])
            if atom[0] == "text"
            else atom[1]
            for atom in atoms
        )

    def sentences(self, atoms):
        found, chunk = [], []
        for atom in [*self.joined(atoms), ("break", "")]:
            if atom[0] != "break":
                chunk.append(atom)
                continue
            found += [self.sentence(chunk)] if chunk else []
            found.append(atom[1])
            chunk = []
        return found

    def sentence(self, atoms):
        sizes = Counter()
        for at, atom in enumerate(atoms):
            if atom[0] == "text":
                if atom[1].isspace() and at and atoms[at - 1][0] == "text":
                    atoms[at] = ("text", atom[1], atoms[at - 1][2])  # blanks take the preceding format
                sizes[atoms[at][2]] += len(atom[1])
        formats = [raw for raw, _ in sizes.most_common()] or [""]
        numbers = {raw: number for number, raw in enumerate(formats)}
        items, at = [], 0
        while at < len(atoms):
            kind, value, *code = atoms[at]
            if kind != "text":
                end = at + 1
                while kind in OBJECTS and end < len(atoms) and atoms[end][0] in OBJECTS:
                    end += 1
                whole = atoms[at:end]
                kind = kind if kind not in OBJECTS else "word" if any(atom[0] == "word" for atom in whole) else "single"
                items.append(Mark("".join(atom[1] for atom in whole), kind, code=code[0] if code else None))
                at = end
                continue
            number, end = numbers[atoms[at][2]], at
            while end < len(atoms) and atoms[end][0] == "text" and atoms[end][2] == formats[number]:
                end += 1
            text = "".join(atom[1] for atom in atoms[at:end])
            at = end
            items += [Mark(f"\x03{number}\x04", "open"), text, Mark("\x03/\x04", "close")] if number else [text]
        if self.right:
            formats = [right_run(raw) for raw in formats]
        return Sentence(items, formats)


def right_run(raw):
    raw = raw or "<w:rPr></w:rPr>"
    return raw if "<w:rtl" in raw else AFTER_RTL.sub(lambda match: "<w:rtl/>" + match[0], raw, count=1)


def unpack(data, target=None):
    archive = Archive(data)
    flow = Flow(archive)
    kinds = {}
    for override in Tree(archive.text("[Content_Types].xml")).root.nodes():
        name = override.attributes.get("PartName", "").lstrip("/")
        kinds.setdefault(name, override.attributes.get("ContentType", ""))
    for name, kind in kinds.items():
        if kind.endswith(tuple(f".{known}+xml" for known in KINDS)) and name in archive.names:
            text = archive.text(name)
            refuse_entities(text, name)
            flow.member(name, Part(text, flow, right_to_left(target)).parts())
    if not flow.members:
        raise ValueError("not a Word document")
    return flow.parts(), flow.finish


def refuse_entities(text, name):
    if "<!ENTITY" in text:
        raise ValueError(f"{name}: unsupported entity declaration")
