"""Office Open XML (docx, pptx, xlsx): paragraphs of runs. Each paragraph is a segment; run formats and links
are marks; formulas are words. Libraries for these formats are not used, as they rewrite many parts."""

import re
from collections import Counter, defaultdict
from operator import itemgetter

from .archive import Archive, Flow, description
from .inline import deletions_before_words, formulas, plain_ordinals
from .languages import is_asian, locale_of, right_to_left, same_language
from .segments import WORD, Mark, Segment, collapsed, has_word, initial_end
from .xmltree import Node, Text, attribute_parts, escape, opening, quoted

# A deletion may move before the word that it splits; a sign is an object at an end of a sentence, else a word
OBJECTS = ["deletion", "object", "sign", "word"]
FIELD = "field"
# Signs for run formats until Sentence writes the runs. XML contains no lone surrogates.
FORMAT, END, CLOSE = "\ud803", "\ud804", "\ud803/\ud804"
SIGN = re.compile(f"(\ud801\\d+\ud802|{FORMAT}[\\d/]+{END})")
RAISED = re.compile(
    r"<(?:w:)?vertAlign\b[^>]*[\"'](?P<name>sup|sub)(?:er)?script[\"'][^>]*/>|\sbaseline=[\"'](?P<sign>-?)[1-9]\d*[\"']"
)
# Formats that readers see, which must not spread to neighbouring characters
VISIBLE = re.compile(
    r"<(?:w:)?(?:b|i|u|strike|dstrike|em|highlight|shd|bdr|rStyle|color|effect|caps|outline|shadow)\b"
    r"(?![^>]*val=[\"'](?:0|false|none|auto|clear)[\"'])|<a:(?:hlinkClick|highlight|solidFill)\b"
    r"|\s(?:b|i|u|strike)=[\"'](?!0|false|none|noStrike)"
)
HARD = re.compile(r"(?<=\d)\u2011(?=\d)")  # in a range of numbers, which translators know with a plain hyphen
HYPHEN = re.compile(r"(?<=\d)-(?=\d)")
LINES = re.compile(r"<(?:w:)?(?:u|strike|dstrike|highlight|shd|bdr)\b|\s(?:u|strike)=[\"'](?!none|noStrike)")


# Elements with alternative texts, and the attributes that contain these
DESCRIBED = (
    dict.fromkeys(("docPr", "cNvPr"), ("descr", "title"))
    | dict.fromkeys(("tblCaption", "tblDescription"), ("w:val",))
    | dict.fromkeys("shape rect roundrect oval group".split(), ("alt",))
)


class Sentence(Segment):
    """A paragraph, or a part of it between breaks. part: makes its runs; formats: their properties; raw: the original;
    initial: the format of a drop cap and the markup that follows the drop cap."""

    def __init__(self, items, part, formats, raw, initial=None):
        self.part, self.formats, self.raw, self.initial = part, formats, raw, initial
        self.hard = any(isinstance(item, str) and HARD.search(item) for item in items)
        super().__init__([HARD.sub("-", item) if isinstance(item, str) else item for item in items], escape)

    def original(self):
        return self.raw

    def _whole(self, raw):
        out, stack, initial = [], [0], self.initial
        for piece in SIGN.split(super()._whole(raw)):
            if piece == CLOSE:
                stack = stack[:-1] or [0]
            elif piece.startswith(FORMAT):
                stack.append(int(piece[1:-1]))
            elif SIGN.match(piece):
                out.append(piece)
            elif piece:
                piece = HYPHEN.sub("\u2011", piece) if self.hard else piece
                form = self.formats[stack[-1]]
                if initial:
                    first = initial_end(piece)
                    out += [self.part.run_of(initial[0], piece[:first]), initial[1]]
                    piece, initial = piece[first:], None
                out += [self.part.run_of(form, piece)] if piece else []
        return "".join(out)


EMPTY = re.compile(r"<[\w:]+\s*(?:/>|></[\w:]+>)")  # a format without properties
SIGNS = re.compile(r"[^\w\s!-/:-@\[-`{-~\u00a1\u00ab\u00b7\u00bb\u00bf\u2010-\u2027\u2030-\u205e\u3001-\u301f]")


class Part:
    """A member of the archive. Subclasses set the names of its elements."""

    prefix = ""
    containers, dropped, breaks, kinds = (), (), (), {}
    shown = ()  # elements whose text objects show
    template = "<r>{}<t>{}</t></r>"
    noise = re.compile(r"(?!)")  # parts of formats that do not distinguish runs
    splits = re.compile("([\u2028\u2029])")  # line breaks and tabs inside texts

    def __init__(self, flow, name, target):
        self.tree, self.flow, self.target, self.right = flow.archive.tree(name), flow, target, right_to_left(target)

    def parts(self):
        return self.tree.spliced(0, len(self.tree.data), self.changes(self.tree.root))

    def is_paragraph(self, node):
        return node.name == self.prefix + "p"

    def is_kept(self, node):
        """Return whether an element has no text to translate."""
        return False

    def changes(self, node):
        """Return the changes to the outermost paragraphs below `node` and to alternative texts."""
        found, waiting = [], [node]
        while waiting:
            at = waiting.pop()
            if self.is_kept(at):
                continue
            if names := DESCRIBED.get(at.name.rpartition(":")[2]):
                found += self.described(at, names)
            if self.is_paragraph(at) and at is not node:
                found += self.paragraph(at)
            else:
                waiting += [child for child in reversed(at.children) if isinstance(child, Node)]
        return found

    def described(self, node, names):
        """Return the changes to the alternative texts of a picture, shape or table, unless they repeat its name."""
        name = node.attributes.get("name")
        parts = attribute_parts(
            self.tree.tag(node), lambda key, text: description(text, quoted) if key in names and text != name else []
        )
        return [(node.begin, node.inside, parts)] if parts else []

    def rendered(self, atom):
        """Return (kind, text or characters of an object, ...) of an atom."""
        kind, value, *rest = atom
        if kind == "text":
            return atom
        changes = []
        if isinstance(value, Node):
            before, after, *rest = rest
            changes = self.changes(value)
            shows = not changes and any(has_word(at.text()) for at in (value, *value.nodes()) if at.name in self.shown)
            kind = self.kinds.get(value.name, "word" if shows else kind) if kind == "object" else kind
            value = [before, *self.tree.spliced(value.begin, value.end, changes), after]
        return kind, self.flow.put(value), *rest

    def is_code(self, style, node):
        """Return whether a paragraph or run has a code style."""
        return False

    def spoken(self, node):
        """Return whether a child of a run is text to translate."""
        return node.name == self.prefix + "t"

    def paragraph(self, node):
        """Return the changes to a paragraph."""
        properties, atoms = node.child(self.prefix + "pPr"), []
        if not self.is_code("pStyle", properties):
            self.visit(node, atoms)
        if not any(atom[0] == "text" and WORD.search(atom[1]) for atom in atoms):
            return [change for child in node.children if isinstance(child, Node) for change in self.changes(child)]
        begin, initial = self.joined(node, properties.end if properties else node.inside, atoms)
        changes = [(begin, node.inside_end, self.sentences(atoms, initial))] if begin is not None else []
        changes = self.head(properties, node.inside) + changes
        node.children = ()  # frees the memory of the tree
        return changes

    def head(self, properties, begin):
        """Return the changes to the properties of a translated paragraph, which precede its content."""
        return []

    def joined(self, node, begin, atoms):
        """Return where the text of a paragraph begins, and the drop cap that precedes it (see Sentence)."""
        return begin, None

    def visit(self, node, atoms):
        """Append the atoms of a paragraph or container, (kind, text or node, ...). Return whether they contain text."""
        text = False
        for child in node.children:
            if isinstance(child, Text) or child.name in self.dropped or child.name == self.prefix + "pPr":
                continue
            if child.name == self.prefix + "r":
                text |= self.run(child, atoms)
                continue
            inner, size, inside = self.content(child), len(atoms), False
            if inner:
                atoms.append(("open", [self.tree.raw(child.begin, inner.inside)]))
                inside = self.visit(inner, atoms)
                atoms.append(("close", [self.tree.raw(inner.inside_end, child.end)]))
            if not inside:
                atoms[size:] = [self.object(child)]
            text |= inside
        return text

    def content(self, node):
        """Return the element with the runs of a container such as a link, or None."""
        return node if node.name in self.containers else None

    def run(self, node, atoms):
        properties, text = node.child(self.prefix + "rPr"), False
        old = self.tree.raw(properties.begin, properties.end) if properties else ""
        form = self.noise.sub("", old)
        form = "" if EMPTY.fullmatch(form) else form
        tag, end, code = opening(self.tree.tag(node)) + old, f"</{node.name}>", self.is_code("rStyle", properties)
        for child in node.children:
            if isinstance(child, Text) or child is properties or child.name in self.dropped:
                continue
            if self.spoken(child) and not code:
                text = True
                self.text(child, form, tag, end, atoms)
            elif not code and (inner := self.content(child)):
                atoms.append(("open", [tag, self.tree.raw(child.begin, inner.inside)]))
                text |= self.visit(inner, atoms)
                atoms.append(("close", [self.tree.raw(inner.inside_end, child.end), end]))
            else:
                atoms.append(self.object(child, tag, end))
        return text

    def object(self, node, before="", after=""):
        """Return the atom of an element that is not text."""
        return "break" if node.name in self.breaks else "object", node, before, after

    def text(self, node, form, tag, end, atoms):
        """Append the text of an element, which may contain line breaks."""
        text = node.text()
        if not self.splits.search(text):
            atoms.append(("text", text, form, tag + self.tree.raw(node.begin, node.end) + end))
            return
        for part in self.splits.split(text):
            raw = self.run_of(form, escape(part))
            atoms += [("break", [raw]) if self.splits.fullmatch(part) else ("text", part, form, raw)] if part else []

    def run_of(self, form, text):
        """Return a run with this escaped text."""
        return self.template.format(form, text)

    def sentences(self, atoms, initial=None):
        found, chunk = [], []
        for atom in [*joined_fields([self.rendered(atom) for atom in atoms], self.flow), ("break", "")]:
            if atom[0] != "break":
                chunk.append(atom)
                continue
            if chunk:
                found.append(self.sentence(chunk, initial))
                initial = None
            found.append(atom[1])
            chunk = []
        return found

    def sentence(self, atoms, initial=None):
        original = "".join(atom[3] if atom[0] == "text" else atom[1] for atom in atoms)
        atoms = deletions_before_words(
            atoms, itemgetter(0), itemgetter(1), lambda atom, text: ("text", text, atom[2], "")
        )
        levels, pairs = levels_of(atoms)
        bases = settled(atoms, levels)
        numbers, items, at = {bases[-1]: 0}, [], 0

        def sign(form):
            return f"{FORMAT}{numbers.setdefault(form, len(numbers))}{END}"

        while at < len(atoms):
            kind, raw, *code = atoms[at]
            begin, level = at, levels[at]
            at += 1
            if kind == "text":
                form = plain(code[0])
                while at < len(atoms) and atoms[at][0] == "text" and plain(atoms[at][2]) == form:
                    at += 1
                inside = [item for atom in atoms[begin:at] for item in raised(atom, sign)]
                same = form == bases[level] or all(RAISED.search(atom[2]) for atom in atoms[begin:at])
                items += inside if same else paired(sign(form), inside)
                continue
            while kind in OBJECTS and at < len(atoms) and atoms[at][0] in OBJECTS:
                kind = max(kind, atoms[at][0], key=OBJECTS.index)
                raw += atoms[at][1]
                at += 1
            if kind == "sign":
                kind = "word" if 0 < begin and at < len(atoms) else "object"
            if begin in pairs:
                raw = raw + sign(bases[begin]) if kind == "open" else CLOSE + raw
            items.append(Mark(raw, "single" if kind in ("object", "deletion") else kind, code=code[0] if code else None))
        items = formulas(collapsed(plain_ordinals(items), escape), escape)
        return Sentence(items, self, [self.directed(form) for form in numbers], original, initial)

    def directed(self, form):
        """Return a format adapted to the direction of the target language."""
        return form


def plain(form):
    """Return a format without superscript or subscript."""
    form = RAISED.sub("", form)
    return "" if EMPTY.fullmatch(form) else form


def paired(sign, inside):
    """Enclose items in a pair of marks, with leading and trailing blanks outside, as translators expect."""
    first, last = ((item if isinstance(item, str) else "") for item in (inside[0], inside[-1]))
    before, after = first[: len(first) - len(first.lstrip())], last[len(last.rstrip()) :]
    if first.isspace():
        return [Mark(sign, "open"), *inside, Mark(CLOSE, "close")]
    inside[0] = inside[0][len(before) :] if before else inside[0]
    inside[-1] = inside[-1].rstrip() if after else inside[-1]
    return [before, Mark(sign, "open"), *inside, Mark(CLOSE, "close"), after]


def raised(atom, sign):
    """Return the items of a text, enclosed in a pair of marks if it is raised or lowered."""
    found = RAISED.search(atom[2])
    if not found:
        return [atom[1]]
    name = found["name"] or ("sub" if found["sign"] else "sup")
    return [Mark(sign(atom[2]), "open", name=name), atom[1], Mark(CLOSE, "close")]


def joined_fields(atoms, flow):
    """Join the codes of each field. A field whose result has no text to translate becomes a word, or an object if it
    shows nothing."""
    found, begins = [], []

    def whole(some):
        return "".join(flow.put([atom[3]]) if atom[0] == "text" else atom[1] for atom in some)

    for atom in atoms:
        kind = atom[0]
        if atom[-1] != FIELD:
            found.append(atom)
        elif kind == "open":
            begins.append(len(found))
            found.append(atom)
        elif not begins:  # begins in an earlier paragraph
            found.append(("object" if kind == "separate" else kind, *atom[1:]))
        elif kind == "separate":
            found[begins[-1] :] = [("open", whole([*found[begins[-1] :], atom]), FIELD)]
        else:
            begin = begins.pop()
            texts = [atom[1] for atom in found[begin:] if atom[0] == "text"]
            if any(map(WORD.search, texts)):
                found.append(atom)
                continue
            shows = any(map(has_word, texts)) or any(atom[0] == "word" for atom in found[begin:])
            found[begin:] = [("word" if shows else "object", whole([*found[begin:], atom]))]
    return found


def levels_of(atoms):
    """Return the number of the atom that opens the container of each atom (-1 if none), and the pairs of their tags."""
    pairs, stack = {}, []
    for at, atom in enumerate(atoms):
        if atom[0] == "open" and len(atom) == 2:
            stack.append(at)
        elif atom[0] == "close" and len(atom) == 2 and stack:
            begin = stack.pop()
            pairs[begin], pairs[at] = at, begin
    levels, stack = [], [-1]
    for at, atom in enumerate(atoms):
        if atom[0] == "close" and at in pairs:
            stack.pop()
        levels.append(stack[-1])
        if atom[0] == "open" and at in pairs:
            stack.append(at)
    return levels, pairs


def settled(atoms, levels):
    """Give blanks and punctuation the format of the surrounding words, or of their container, so that visible
    formats do not spread. Return the format of each container: the most frequent, if possible without visible marks."""
    sizes, first = defaultdict(Counter), defaultdict(str)
    texts = [at for at, atom in enumerate(atoms) if atom[0] == "text"]
    words = [any(map(str.isalnum, atoms[at][1])) for at in texts]
    for at, word in zip(texts, words):
        form = plain(atoms[at][2])
        first.setdefault(levels[at], form)
        sizes[levels[at]][form] += len(atoms[at][1]) * word
    for level, found in sizes.items():
        some = [form for form in found if found[form]] or [first[level]]
        first[level] = min(some, key=lambda form: (len(VISIBLE.findall(form)), -found[form]))
    after, following = [], None
    for at, word in zip(reversed(texts), reversed(words)):
        after.append(following)
        following = (levels[at], plain(atoms[at][2])) if word else following
    before = None
    for at, word, following in zip(texts, words, reversed(after)):
        _, text, form, raw = atoms[at]
        if word:
            before = levels[at], plain(form)
        elif not (RAISED.search(form) or SIGNS.search(text) or text.isspace() and len(text) > 1 and LINES.search(form)):
            same = before and before == following and before[0] == levels[at]
            atoms[at] = "text", text, before[1] if same else first[levels[at]], raw
    return first


class Languages:
    """A part that names the language of the document, such as styles."""

    named = r"<w:(?:lang|themeFontLang)\b[^>]*?\sw:{}=[\"']|<a:\w+\b[^>]*?\slang=[\"']|<dc:language>"

    def __init__(self, flow, name, target):
        self.text, self.target = flow.archive.text(name), target

    def parts(self):
        if not self.target:
            return []
        key = "bidi" if right_to_left(self.target) else "eastAsia" if is_asian(self.target) else "val"
        pattern = re.compile(f"({self.named.format(key)})([^\"'<]+)")
        first = pattern.search(self.text)
        text = pattern.sub(
            lambda match: match[1] + (locale_of(self.target) if same_language(match[2], first[2]) else match[2]),
            self.text,
        )
        return [text] if text != self.text else []


LANGUAGES = dict.fromkeys(".core-properties .styles .settings .presentation.main".split(), Languages)


def unpack(data, kinds, what, target=None):
    """Return the parts of a package and its finish(). kinds: {end of a content type: class of such parts}."""
    archive = Archive(data)
    flow, types, known = Flow(archive), {}, False
    for override in archive.tree("[Content_Types].xml").root.nodes():
        name = override.attributes.get("PartName", "").lstrip("/")
        types.setdefault(name, override.attributes.get("ContentType", ""))
    for name, kind in types.items():
        make = next((part for end, part in (kinds | LANGUAGES).items() if kind.endswith(end + "+xml")), None)
        if make and name in archive.names:
            known |= make is not Languages
            parts = make(flow, name, target).parts()
            flow.member(name, parts) if parts else None
    if not known:
        raise ValueError(f"not {what}: no text in [Content_Types].xml")
    return flow.parts(), flow.finish
