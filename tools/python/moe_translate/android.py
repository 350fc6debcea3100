"""Android's strings.xml: strings, arrays and plurals, with markup, CDATA and Android's escapes. Names, comments and
strings marked untranslatable do not change."""

import re

from .conversions import prose, same_conversions
from .lines import text_parts
from .segments import Mark, Segment
from .xmltree import Node, Text, Tree
from .xmltree import escape as escape_xml

ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.S)
SIGNS = {"n": "\n", "t": "\t"}


class Marked(Segment):
    """A string with markup or CDATA, whose bytes `raw` are written back unless the words change."""

    raw = None

    def original(self):
        return self.raw


def keeping(part, raw):
    part.raw = raw
    return part


def plain(text):
    """Return a text as displayed, with the file's line breaks as spaces."""
    text = re.sub(r"\s+", " ", text)
    return ESCAPE.sub(lambda m: chr(int(m[1][1:], 16)) if len(m[1]) == 5 else SIGNS.get(m[1], m[1]), text)


def escaped(text):
    text = text.replace("\\", "\\\\").replace("'", "\\'").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return "\\" + text if text[:1] in "@?" and text else text


def in_markup(text):
    return escape_xml(escaped(text))


def value(tree, node):
    """Return the parts of an element's content, or None if there is nothing to translate."""
    raw, texts = tree.raw(node.inside, node.inside_end), [c for c in node.children if isinstance(c, Text)]
    whole = "".join(text.text for text in texts)
    if not (prose(plain(whole)) or any(isinstance(c, Node) for c in node.children)) or whole.lstrip()[:1] in ("@", "?"):
        return None
    check = same_conversions(raw)
    if raw.strip().startswith("<![CDATA[") and raw.strip().endswith("]]>") and raw.count("<![CDATA[") == 1:
        begin, end = raw.index("<![CDATA[") + 9, raw.rindex("]]>")
        segment = Marked([plain(raw[begin:end])], lambda text: escaped(text).replace("]]>", "]] >"), check)
        return [raw[:begin], keeping(segment, raw[begin:end]), raw[end:]]
    if any(text.cdata for text in texts):
        return None
    if len(texts) == len(node.children):
        quoted = len(whole.strip()) > 1 and whole.strip()[0] == whole.strip()[-1] == '"'
        begin, quote = len(raw) - len(raw.lstrip()), '"' if quoted else ""
        end = len(raw.rstrip())
        inner = raw[begin + len(quote) : end - len(quote)]
        same = raw[begin : begin + len(quote)] == raw[end - len(quote) : end] == quote
        text = plain(whole.strip()[1:-1] if quoted else whole.strip())
        options = {"escape": in_markup, "checked": True} | ({"raw": inner} if same else {})
        return [raw[:begin], quote, *text_parts(text, newline="\\n", **options), quote, raw[end:]]
    items, waiting = [], [(child, None) for child in reversed(node.children)]
    while waiting:
        child, close = waiting.pop()
        if close is not None:
            items.append(Mark(close, "close"))
        elif isinstance(child, Text):
            for at, line in enumerate(plain(child.text).split("\n")):
                items += ([Mark("\\n")] if at else []) + [line]
        elif child.name and ":" not in child.name and child.children:
            items.append(Mark(tree.tag(child), "open"))
            waiting.append((None, tree.raw(child.inside_end, child.end)))
            waiting += [(inner, None) for inner in reversed(child.children)]
        else:  # <xliff:g> stands for words
            items.append(Mark(tree.raw(child.begin, child.end), "word" if ":" in child.name else "single"))
    return [keeping(Marked(items, in_markup, check), raw)]


def parts(data):
    tree, changes = Tree(data), []
    root = next((node for node in tree.root.children if isinstance(node, Node)), None)
    if root is None or root.name != "resources":
        raise ValueError("not Android strings: missing <resources> element")
    for node in root.children:
        if not isinstance(node, Node) or node.attributes.get("translatable") == "false":
            continue
        items = [child for child in node.children if isinstance(child, Node) and child.name == "item"]
        for one in [node] if node.name == "string" else items if node.name in ("string-array", "plurals") else []:
            found = value(tree, one)
            if found:
                changes.append((one.inside, one.inside_end, found))
    return tree.spliced(0, len(tree.data), changes)
