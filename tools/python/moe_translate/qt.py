"""Qt's .ts files: add missing translations, marked unfinished for review; with overwrite, replace existing ones too."""

import re

from .languages import declared, two_letters
from .lines import text_parts
from .po import plurals_of
from .segments import Mark, Segment
from .xmltree import Node, Text, Tree, escape, opening, with_attribute


def parts(data, overwrite=False, target=None):
    tree, changes = Tree(data), []
    root = next((node for node in tree.root.children if isinstance(node, Node) and node.name == "TS"), None)
    if root is None:
        raise ValueError("not a Qt Linguist file: missing <TS> element")
    kept = False
    for node in tree.root.nodes("message"):
        source, translation = node.child("source"), node.child("translation")
        if source is None:
            continue
        kind = translation.attributes.get("type", "") if translation else "unfinished"
        done = translation is not None and re.sub(r"<[^<>]*>", "", tree.raw(translation.inside, translation.inside_end))
        if kind in ("obsolete", "vanished"):
            continue
        if not overwrite and (kind != "unfinished" or done and done.strip()):
            kept = kept or bool(done and done.strip())
            continue
        text = source.text()
        if not re.search(r"[^\W\d_]", text):
            continue
        changes.append(change(tree, node, translation, target))
    if declared(root.attributes.get("language", ""), target, kept):
        changes.append((root.begin, root.inside, [with_attribute(tree.tag(root), "language", two_letters(target))]))
    return tree.spliced(0, len(tree.data), changes)


def change(tree, node, translation, target):
    source = node.child("source")

    def one():
        if not any(isinstance(child, Node) for child in source.children):
            return text_parts(source.text(), escape=escape, keys=True, checked=True)
        items = [at.text if isinstance(at, Text) else Mark(tree.raw(at.begin, at.end)) for at in source.children]
        return [Segment(items, escape)]  # <byte value="x1b"/> is a character that XML cannot contain

    found = one()
    if node.attributes.get("numerus") == "yes":
        match = re.match(r"nplurals=(\d)", (target and plurals_of(target)) or "")
        forms = len([child for child in translation.children if isinstance(child, Node)]) if translation else 0
        found = []
        for _ in range(int(match[1]) if match else max(forms, 1)):
            found += ["\n            <numerusform>", *one(), "</numerusform>"]
        found.append("\n        ")
    if translation is None:
        return source.end, source.end, ['\n        <translation type="unfinished">', *found, "</translation>"]
    tag = with_attribute(opening(tree.tag(translation)), "type", "unfinished")
    return translation.begin, translation.end, [tag, *found, "</translation>"]
