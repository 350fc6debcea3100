"""XLIFF 1.2 and 2: add missing translations; with overwrite, replace existing ones too. Inline elements are marks; the
content of native codes does not change. The translate-toolkit is not used: it is under GPL and rewrites files."""

import re

from .conversions import same_conversions
from .languages import two_letters
from .segments import Mark, Segment, has_word
from .xmltree import Node, Text, Tree, escape, opening, with_attribute

PAIRS = {"g", "pc", "mrk"}
# Elements that form a pair with another element: kind, name of the pair, attributes that identify it
CODES = {
    "bpt": ("open", "bpt", ("rid", "id")),
    "ept": ("close", "bpt", ("rid", "id")),
    "bx": ("open", "bx", ("rid", "id")),
    "ex": ("close", "bx", ("rid", "id")),
    "sc": ("open", "sc", ("id",)),
    "ec": ("close", "sc", ("startRef", "id")),
    "sm": ("open", "sm", ("id",)),
    "em": ("close", "sm", ("startRef",)),
}
ANGULAR = re.compile(r"(START|CLOSE)_(\w+)$")  # <x id="START_LINK"/>
TAG = re.compile(r"<(/?)([a-zA-Z][\w:.-]*)[^<>]*?(/?)>")
BREAK = re.compile(r"(?:\\[nrt])+")
# names and types of codes that stand for no word, such as a line break or an image
EMPTY = re.compile(r"(?i)(?<![a-z])(?:[lp]b|br|hr|wbr|img|image|input|line_?break)(?![a-z])")


def local(node):
    return node.name.split(":")[-1]


def code_of(tree, node):
    """Return (kind, code) of an inline element that stands for a code of the original document."""
    name, at = local(node), node.attributes
    if name in CODES:
        kind, pair, keys = CODES[name]
        return kind, (pair, next((at[key] for key in keys if at.get(key)), None))
    if name == "it":  # the other code is in another segment
        return ("close" if at.get("pos") == "close" else "open"), node
    named = ANGULAR.match(at.get("id", "")) or ANGULAR.match(at.get("equiv", ""))
    if named:
        return ("open" if named[1] == "START" else "close"), ("x", re.sub(r"_\d+$", "", named[2]))
    if name in PAIRS:
        return "word" if has_word(re.sub(r"<[^<>]*>", "", tree.raw(node.inside, node.inside_end))) else "single", None
    text = (at.get("equiv-text") or at.get("disp") or node.text()).strip()
    tag = TAG.fullmatch(text)
    if tag and not tag[3] and not EMPTY.search(tag[2]):
        return ("close" if tag[1] else "open"), ("tag", tag[2].lower())
    kinds = " ".join(at.get(key, "") for key in ("id", "ctype", "type", "subType", "equiv"))
    return "single" if tag or BREAK.fullmatch(text) or EMPTY.search(kinds) else "word", None


def items(tree, node):
    found, waiting = [], [(child, None) for child in reversed(node.children)]
    while waiting:
        child, close = waiting.pop()
        if close is not None:
            found.append(Mark(close, "close"))
        elif isinstance(child, Text):
            found.append(child.text)
        elif local(child) in PAIRS and child.children and not is_protected(child):
            found.append(Mark(tree.tag(child), "open"))
            waiting.append((None, tree.raw(child.inside_end, child.end)))
            waiting += [(inner, None) for inner in reversed(child.children)]
        else:
            kind, code = code_of(tree, child)
            found.append(Mark(tree.raw(child.begin, child.end), kind, code=code))
    return found


def is_protected(node):
    return node.attributes.get("translate") == "no" or node.attributes.get("mtype") == "protected"


def unit(tree, node, overwrite, old):
    """Return the change that adds a target to a trans-unit or segment, or None if the target exists."""
    source = next((child for child in node.children if isinstance(child, Node) and local(child) == "source"), None)
    if source is None or not re.search(r"[^\W\d_]", "".join(t for t in items(tree, source) if isinstance(t, str))):
        return None
    target = next((child for child in node.children if isinstance(child, Node) and local(child) == "target"), None)
    text = [tree.raw(source.inside, source.inside_end)]
    if target and tree.raw(target.inside, target.inside_end).strip() and not overwrite:
        state = target.attributes.get("state", "") if old else ""
        if state not in ("new", "needs-translation") or tree.raw(target.inside, target.inside_end) != text[0]:
            return None
    segment = Segment(items(tree, source), escape, same_conversions(text[0]))
    prefix = source.name[: -len("source")]
    tag = tree.tag(target) if target else f"<{prefix}target>"
    tag = opening(tag)
    if old:
        tag = with_attribute(tag, "state", "needs-review-translation")
    parts = [tag, segment, f"</{prefix}target>"]
    if target:
        return target.begin, target.end, parts
    behind = next((n for n in node.children if isinstance(n, Node) and local(n) == "seg-source"), source)
    before = tree.raw(node.inside, source.begin)
    before = before[len(before.rstrip()) :]
    return behind.end, behind.end, [before, *parts]


def refused(node):
    while node is not None:
        if node.attributes.get("translate") == "no":
            return True
        node = node.parent
    return False


def parts(data, overwrite=False, target=None):
    tree = Tree(data)
    root = next((node for node in tree.root.nodes() if local(node) == "xliff"), None)
    if root is None:
        raise ValueError("not an XLIFF file: missing <xliff> element")
    old = not root.attributes.get("version", "1.2").startswith("2")
    changes, language = [], two_letters(target).replace("_", "-") if target else None
    for node in tree.root.nodes():
        name = local(node)
        if language and name == ("file" if old else "xliff"):
            key = "target-language" if old else "trgLang"
            if not node.attributes.get(key):
                changes.append((node.begin, node.inside, [with_attribute(tree.tag(node), key, language)]))
        if name == ("trans-unit" if old else "segment") and not refused(node):
            change = unit(tree, node, overwrite, old)
            changes += [change] if change else []
    return tree.spliced(0, len(tree.data), changes)
