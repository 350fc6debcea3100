"""Android's strings.xml: strings, arrays and plurals, with markup, CDATA and Android's escapes. Names, comments and
strings marked untranslatable do not change."""

import itertools
import re

from .conversions import prose, same_conversions
from .languages import renamed
from .lines import raw_lines, text_parts
from .segments import Mark, Segment
from .xmltree import Node, Text, Tree, with_attribute
from .xmltree import escape as escape_xml

CHARACTER = re.compile(r"\\(u[0-9a-fA-F]{4}|.)|(\")|([ \t\r\n]+)|([^\\\" \t\r\n]+|\\)", re.S)
SIGNS = {"n": "\n", "t": "\t"}
# White space and quotes at the ends of a string; Android drops white space that is neither escaped nor in quotes.
SPACE = r"(?:\s|(?<!\\)\\(?:u0020|u00[aA]0|[nt]))*"
WHOLE = re.compile(
    rf"(?P<lead>{SPACE}(?P<quote>\"{SPACE})?)(?P<core>.*?)(?P<trail>{SPACE}(?(quote)(?<!\\)\"{SPACE}))", re.S
)
SECTION = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.S)
PIECE = re.compile(
    r"""(?P<line>\\n)|(?P<entity>&(?!(?:amp|lt|gt|quot|apos|\#\w+);)[\w.-]+;)
      | (?P<whole><!--.*?-->|<(?P<prefixed>\w+:\w+)\b[^<>]*(?:/>|>.*?</(?P=prefixed)\s*>))
      | (?P<tag><(?P<end>/?)(?P<name>[a-zA-Z][\w.-]*)(?:[^<>"']|"[^"]*"|'[^']*')*>)
      | (?P<text>(?:\\[^n]|[^\\<&]|&(?:amp|lt|gt|quot|apos|\#\w+);)+|.)""",
    re.X | re.S,
)
ENTITY = re.compile(r"&(?:#(\d+)|#x([0-9a-fA-F]+)|(\w+));")
NAMED = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
BREAKS = set("br p div li ul ol h1 h2 h3 h4 h5 h6 table tr td th blockquote hr".split())


class Marked(Segment):
    """A string with markup or CDATA, whose bytes `raw` are written back unless the words change."""

    def __init__(self, items, raw, encode):
        super().__init__(items, escaper(raw, encode), same_conversions(raw))
        self.raw = raw

    def original(self):
        return self.raw


def plain(text):
    """Resolve escapes; white space outside quotes, such as the file's line breaks, becomes one space."""
    found, quoted = [], False
    for escape, quote, space, rest in CHARACTER.findall(text):
        quoted ^= bool(quote)
        if escape:
            found.append(chr(int(escape[1:], 16)) if len(escape) == 5 else SIGNS.get(escape, escape))
        else:
            found.append(rest or quote or (space if quoted else " "))
    return "".join(found)


def escaper(raw, encode):
    """Return a function that writes a text with Android's escapes, using quotes and e.g. \\u00A0 as in `raw`."""
    codes = {chr(int(code[1:], 16)): "\\" + code for code, *_ in CHARACTER.findall(raw) if len(code) == 5}
    codes = {sign: code for sign, code in codes.items() if sign not in " \\'\"@?\n\t<>&" and not sign.isalnum()}
    quote = '"' if any(quote for _, quote, *_ in CHARACTER.findall(raw)) else '\\"'
    signs = re.compile("|".join(map(re.escape, codes)) or r"(?!)")

    def escape(text):
        text = text.replace("\\", "\\\\").replace("'", "\\'").replace('"', quote)
        text = text.replace("\n", "\\n").replace("\t", "\\t")
        text = encode("\\" + text if text[:1] in "@?" and text else text)
        return signs.sub(lambda sign: codes[sign[0]], text)

    return escape


def resolved(text):
    """Resolve XML's entities."""
    return ENTITY.sub(lambda m: chr(int(m[1])) if m[1] else chr(int(m[2], 16)) if m[2] else NAMED[m[3]], text)


def pieces(raw, section):
    """Yield (item, its bytes) for a string with markup; the item is None at a line break."""
    for match in PIECE.finditer(raw):
        kind = match.lastgroup if match.lastgroup in ("line", "entity", "whole", "text") else "tag"
        if kind == "line" or kind == "tag" and section and match["name"].lower() in BREAKS:
            yield None, match[0]
        elif kind == "text" or kind == "entity" and section:
            yield (match[0] if section else resolved(match[0])), match[0]
        else:
            word = kind == "entity" or match["prefixed"]  # <xliff:g> and &name; stand for words
            pair = kind == "tag" and not match[0].endswith("/>")
            kind = "word" if word else ("close" if match["end"] else "open") if pair else "single"
            yield Mark(match[0], kind), match[0]


def marked(raw, section=False):
    """Return the parts of a string with markup: the segments between its line breaks."""
    found = []
    for broken, group in itertools.groupby(pieces(raw, section), lambda piece: piece[0] is None):
        items, raws = zip(*group)
        source = "".join(raws)
        texts = itertools.groupby(items, lambda item: isinstance(item, str))
        items = [item for text, run in texts for item in ([plain("".join(run))] if text else run)]
        if broken or not prose("".join(item for item in items if isinstance(item, str))):
            found.append(source)
        else:
            found.append(Marked(items, source, in_section if section else escape_xml))
    return found


def in_section(text):
    return text.replace("]]>", "]] >")


def value(tree, node):
    """Return the parts of an element's content, or None if there is nothing to translate."""
    raw, texts = tree.raw(node.inside, node.inside_end), [c for c in node.children if isinstance(c, Text)]
    name = node.attributes.get("name") or node.parent.attributes.get("name", "")
    whole = "".join(text.text for text in texts)
    if any(text.cdata for text in texts):
        found = []
        for at, part in enumerate(SECTION.split(raw)):
            found += ["<![CDATA[", *marked(part, True), "]]>"] if at % 2 else marked(part)
        return found
    if whole.lstrip()[:1] in ("@", "?") or not prose(plain(whole), name):
        return None
    form = WHOLE.fullmatch(raw)
    lead, core, trail = form["lead"], form["core"], form["trail"]
    quoted = form["quote"] is not None
    if quoted and re.search(r'(?<!\\)"', core):
        quoted, lead, core, trail = False, "", raw, ""
    if len(texts) < len(node.children) or "<" in raw:
        return [lead, *marked(core), trail]
    newline = "\n" if quoted and "\n" in core and "\\n" not in core else "\\n"
    text = resolved(core) if newline == "\n" else plain(resolved(core))
    if text.count("\n") != len(raw_lines(core, newline)[1]):  # a line break as a character reference
        return [lead, Marked([text], core, escape_xml), trail]
    return [lead, *text_parts(text, escape=escaper(core, escape_xml), checked=True, newline=newline, raw=core), trail]


def parts(data, source=None, target=None):
    tree, changes = Tree(data), []
    root = next((node for node in tree.root.children if isinstance(node, Node)), None)
    if root is None or root.name != "resources":
        raise ValueError("not Android strings: missing <resources> element")
    if code := renamed(root.attributes.get("tools:locale", ""), source, target):
        changes.append((root.begin, root.inside, [with_attribute(tree.tag(root), "tools:locale", code)]))
    for node in root.children:
        if not isinstance(node, Node) or node.attributes.get("translatable") == "false":
            continue
        items = [child for child in node.children if isinstance(child, Node) and child.name == "item"]
        string = (node.attributes.get("type") if node.name == "item" else node.name) == "string"
        for one in [node] if string else items if node.name in ("string-array", "array", "plurals") else []:
            found = value(tree, one) if one.attributes.get("translatable") != "false" else None
            if found:
                changes.append((one.inside, one.inside_end, found))
    return tree.spliced(0, len(tree.data), changes)
