"""Word documents (.docx): paragraphs of the text, tables, headers, footers, notes, text boxes, diagrams and chart
titles. Tracked insertions are translated. Deletions, code (styles named Verbatim, Code, Source), formulas and merge
fields are not."""

import re

from . import ooxml
from .pptx import DRAWINGS

CONTAINERS = set("w:hyperlink w:ins w:moveTo w:smartTag w:fldSimple w:sdt w:customXml w:dir w:bdo".split())
CODE = re.compile(r"verbatim|source|code|preformatted|listing", re.I)
FIELDS = re.compile(r"\s*(?:MERGEFIELD|ADDIN|FILENAME|AUTHOR|DATE|TIME|DOCPROPERTY|CITATION|EQ|SYMBOL|FORM\w+)\b")
RANGE = re.compile(r"w:(bookmark|commentRange|perm|(?:move(?:From|To)|customXml\w+)Range)(Start|End)$")
CODES = {"begin": "open", "separate": "separate", "end": "close"}  # of a field
CHARACTERS = {"w:softHyphen": "\u00ad", "w:noBreakHyphen": "\u2011"}  # elements that are characters of a word
AFTER_BIDI = re.compile(
    r"<w:(?:adjustRightInd|snapToGrid|spacing|ind|contextualSpacing|mirrorIndents|suppressOverlap|jc|textDirection"
    r"|textAlignment|textboxTightWrap|outlineLvl|divId|cnfStyle|rPr|sectPr|pPrChange)\b|</w:pPr>"
)
AFTER_RTL = re.compile(r"<w:(?:cs|em|lang|eastAsianLayout|specVanish|oMath|rPrChange)\b|</w:rPr>")


class Part(ooxml.Part):
    prefix = "w:"
    containers = CONTAINERS
    dropped = {"w:proofErr", "w:lastRenderedPageBreak"}  # traces of Word's last proofreading and layout
    breaks = {"w:tab", "w:br", "w:cr", "w:ptab"}
    shown = {"w:t", "m:t"}
    kinds = {"w:del": "deletion", "w:moveFrom": "deletion", "w:sym": "sign", "w:object": "word", "w:pgNum": "word"}
    template = '<w:r>{}<w:t xml:space="preserve">{}</w:t></w:r>'
    noise = re.compile(r"<w:lang\b[^>]*/>|<w:noProof\s*/>")

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.fields, self.cap = [], None

    def run_of(self, form, text):
        for element, character in CHARACTERS.items():
            text = text.replace(character, f'</w:t><{element}/><w:t xml:space="preserve">')
        return super().run_of(form, text)

    def is_code(self, name, properties):
        style = properties.child("w:" + name) if properties else None
        return bool(style and CODE.search(style.attributes.get("w:val", "")))

    def head(self, properties, begin):
        if not self.right:
            return []
        raw = self.tree.raw(properties.begin, properties.end) if properties else "<w:pPr></w:pPr>"
        raw = re.sub(r"^<w:pPr\s*/>$", "<w:pPr></w:pPr>", raw)
        if "<w:bidi" not in raw:
            raw = AFTER_BIDI.sub(lambda match: "<w:bidi/>" + match[0], raw, count=1)
        return [(properties.begin, properties.end, [raw]) if properties else (begin, begin, [raw])]

    def joined(self, node, begin, atoms):
        cap, self.cap = self.cap, None
        properties = node.child("w:pPr")
        frame = properties.child("w:framePr") if properties else None
        texts = [atom for atom in atoms if atom[0] == "text"]
        if frame and frame.attributes.get("w:dropCap") in ("drop", "margin") and not self.right:
            letters = "".join(atom[1] for atom in texts).strip()
            if letters and letters[-1].isalpha() and len(letters) < 4 and len(texts) == len(atoms):
                self.cap = node, begin, letters, texts[0][2]
                return None, None
        first = next((at for at, atom in enumerate(atoms) if atom[0] == "text"), 0)
        if not cap or cap[0].parent is not node.parent or self.tree.raw(cap[0].end, node.begin).strip():
            return begin, None
        kind, text, *rest = atoms[first]
        before = all(atom[0] == "object" or isinstance(atom[-1], tuple) for atom in atoms[:first])
        if kind != "text" or not text[:1].isalpha() or not before:
            return begin, None
        between = self.flow.put([self.tree.raw(cap[0].inside_end, begin)])
        between += "".join(self.rendered(atom)[1] for atom in atoms[:first])
        before = self.flow.put([self.tree.raw(cap[1], cap[0].inside_end)])
        atoms[: first + 1] = [("text", cap[2] + text, rest[0], before + between + rest[1])]
        return cap[1], (cap[3], between)

    def content(self, node):
        if FIELDS.match(node.attributes.get("w:instr", "")):
            return None
        inside = {"w:sdt": "w:sdtContent", "w:ruby": "w:rubyBase"}.get(node.name)
        return node.child(inside) if inside else super().content(node)

    def spoken(self, node):
        self.field(node)
        text = node.name == "w:t" or node.name in CHARACTERS
        return text and not any(FIELDS.match(field) for field in self.fields)

    def object(self, node, before="", after=""):
        if node.name == "w:fldChar" and (kind := CODES.get(node.attributes.get("w:fldCharType"))):
            return kind, node, before, after, ooxml.FIELD
        if match := RANGE.match(node.name):
            code = match[1], node.attributes.get("w:id")
            return "open" if match[2] == "Start" else "close", node, before, after, code
        kind, *rest = super().object(node, before, after)
        return "object" if self.fields else kind, *rest

    def text(self, node, form, tag, end, atoms):
        super().text(node, form, tag, end, atoms)
        if node.name in CHARACTERS:
            atoms[-1] = ("text", CHARACTERS[node.name], *atoms[-1][2:])

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

    def directed(self, form):
        form = form or "<w:rPr></w:rPr>" * self.right
        return (
            AFTER_RTL.sub(lambda match: "<w:rtl/>" + match[0], form, count=1)
            if self.right and "<w:rtl" not in form
            else form
        )


def unpack(data, target=None):
    return ooxml.unpack(data, KINDS, "a Word document", target)


KINDS = (
    dict.fromkeys(
        ".document.main .template.main .document.macroEnabled.main .header .footer .footnotes .endnotes".split(), Part
    )
    | DRAWINGS
)
