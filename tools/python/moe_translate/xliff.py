"""XLIFF 1.2 and 2, with the segments and states of Trados (sdlxliff) and memoQ (mqxliff): add missing translations;
with overwrite, replace existing ones too, except locked ones. Inline elements are marks; the content of native codes
does not change. The translate-toolkit is not used: it is under GPL and rewrites files."""

import re

from .conversions import same_conversions
from .languages import declared, two_letters
from .lines import text_parts
from .segments import Mark, Segment, has_word
from .xmltree import Node, Text, Tree, escape, opening, with_attribute

PAIRS = {"g", "pc", "mrk"}
# Elements that form a pair with another element: kind, pair name, attributes that identify it
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
# names and types of codes that do not stand for words, such as a line break or an image
EMPTY = re.compile(r"(?i)(?<![a-z])(?:[lp]b|br|hr|wbr|img|image|input|line_?break)(?![a-z])")
DONE = "needs-review-translation"
LOCKED = {"locked", "true", "1", "yes"}
# Unit attributes before and after machine translation
LABELS = (
    ("approved", "yes", "no"),
    ("state", "initial", "translated"),
    ("mq:status", "NotStarted", "PartiallyEdited"),
)


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


def named(node, name):
    return next((child for child in node.children if isinstance(child, Node) and local(child) == name), None)


def raw(tree, node):
    return tree.raw(node.inside, node.inside_end)


def spoken(found):
    return any(isinstance(item, str) and re.search(r"[^\W\d_]", item) for item in found)


def preserved(node):
    while node is not None and "xml:space" not in node.attributes:
        node = node.parent
    return node is not None and node.attributes["xml:space"] == "preserve"


def in_section(text):
    return text.replace("]]>", "]] >")


def rows_of(found, newline):
    """Split items into lines; line breaks inside pairs become marks."""
    rows, depth = [[]], 0
    for item in found:
        first, *more = item.split("\n") if isinstance(item, str) else [item]
        depth += isinstance(item, Mark) and {"open": 1, "close": -1}.get(item.kind, 0)
        rows[-1].append(first)
        for line in more:
            if depth > 0:
                rows[-1] += [Mark(newline), line]
            else:
                rows.append([line])
    return rows


def content(tree, node):
    """Return the parts that translate the content of a source: a segment for each line, if its line breaks count."""
    found, text = items(tree, node), raw(tree, node)
    marked = any(isinstance(item, Mark) for item in found)
    section = not marked and any(child.cdata for child in node.children)
    write = in_section if section else escape
    references = re.findall(r"&#(?:0*10|x0*[aA]);", text)
    newline = references[0] if references and "\n" not in text and not section else "\n"
    counts = newline != "\n" or preserved(node)
    if counts and not marked:
        parts = text_parts("".join(found), escape=write, newline=newline, checked=True)
    else:
        parts = []
        for row in rows_of(found, newline) if counts else [found]:
            whole = "".join(item.raw if isinstance(item, Mark) else write(item) for item in row)
            parts += [newline, Segment(row, write, same_conversions(whole))]
        parts = parts[1:]
    return ["<![CDATA[", *parts, "]]>"] if section else parts


def pending(tree, source, target, fresh, overwrite):
    """Return whether a source must be translated. fresh: according to its state, the target is a copy of the source."""
    if source is None or not spoken(items(tree, source)):
        return False
    if target is None or overwrite or not raw(tree, target).strip():
        return True
    return fresh and " ".join(raw(tree, target).split()) == " ".join(raw(tree, source).split())


def filled(tree, node, found):
    """Return an element with new content as parts."""
    return [opening(tree.tag(node)), *found, f"</{node.name}>"]


def pieces(node):
    """Return the segments of a seg-source or target: {mid, or a number if it is missing or not unique: element}."""
    found = {}
    for mark in node.nodes() if node is not None else ():
        if mark.attributes.get("mtype") == "seg":
            mid = mark.attributes.get("mid")
            found[len(found) if mid is None or mid in found else mid] = mark
    return found


class Unit:
    """A trans-unit of XLIFF 1.2 or a segment of XLIFF 2. changes: those that translate it; kept: the unit keeps a
    translation."""

    def __init__(self, tree, node, overwrite, old):
        self.tree, self.node, self.overwrite, self.changes, self.kept = tree, node, overwrite, [], False
        self.source, self.target = named(node, "source"), named(node, "target")
        cut, definitions = named(node, "seg-source"), named(node, "seg-defs")
        self.definitions = {one.attributes.get("id"): one for one in definitions.nodes()} if definitions else {}
        locked = any(name.split(":")[-1] == "locked" and value in LOCKED for name, value in node.attributes.items())
        if self.source is None or locked:
            return
        attributes = node.attributes if not old or not self.target else self.target.attributes
        state = attributes.get("state", "" if old else "initial")
        fresh = state in ("new", "needs-translation", "initial") or node.attributes.get("mq:status") == "NotStarted"
        if old and pieces(cut):
            self.segmented(cut, fresh)
        elif pending(tree, self.source, self.target, fresh, overwrite):
            self.put(self.source, content(tree, self.source), old)
        elif self.target is not None and raw(tree, self.target).strip():
            self.kept = True
        if self.changes:
            self.relabel()

    def segmented(self, cut, fresh):
        tree, sources, targets, todo = self.tree, pieces(cut), pieces(self.target), {}
        free = {mid: one for mid, one in sources.items() if self.definition(mid, "locked") not in LOCKED}
        for mid, source in free.items():
            copied = self.definition(mid, "conf") in ("", "Draft") and self.definition(mid, "origin") in ("", "source")
            new = copied if mid in self.definitions else fresh
            if pending(tree, source, targets.get(mid), new, self.overwrite):
                todo[mid] = content(tree, source)
        whole = self.target is not None and not targets and raw(tree, self.target).strip() and not self.overwrite
        self.kept = bool(whole) or any(raw(tree, one).strip() and mid not in todo for mid, one in targets.items())
        if not todo or whole:
            return
        if any(raw(tree, one).strip() for one in targets.values()):
            found = {mid: todo.get(mid) or [raw(tree, one)] for mid, one in free.items()}
            for mid, one in targets.items():
                if mid in todo or mid in free and not raw(tree, one).strip():
                    self.changes.append((one.begin, one.end, filled(tree, one, found[mid])))
            more = [part for mid in free if mid not in targets for part in filled(tree, sources[mid], found[mid])]
            self.changes.append((self.target.inside_end, self.target.inside_end, more))
            if "state" in self.target.attributes:
                tag = with_attribute(tree.tag(self.target), "state", DONE)
                self.changes.append((self.target.begin, self.target.inside, [tag]))
        else:
            inner = [(sources[mid].inside, sources[mid].inside_end, found) for mid, found in todo.items()]
            self.put(cut, tree.spliced(cut.inside, cut.inside_end, inner), not self.definitions)
        for mid in todo.keys() & self.definitions.keys():
            one = self.definitions[mid]
            tag = with_attribute(with_attribute(tree.tag(one), "conf", "Draft"), "origin", "mt")
            self.changes.append((one.begin, one.inside, [tag]))

    def definition(self, mid, name):
        return self.definitions[mid].attributes.get(name, "") if mid in self.definitions else ""

    def put(self, previous, found, stated):
        """Write the target; insert a missing target after the element `previous`."""
        tree, target, prefix = self.tree, self.target, self.source.name[: -len("source")]
        tag = opening(tree.tag(target)) if target else f"<{prefix}target>"
        tag = with_attribute(tag, "state", DONE) if stated else tag
        found = [tag, *found, f"</{target.name if target else prefix + 'target'}>"]
        if target:
            self.changes.append((target.begin, target.end, found))
            return
        previous = named(self.node, "seg-source") or previous
        before = tree.raw(self.node.inside, self.source.begin)
        self.changes.append((previous.end, previous.end, [before[len(before.rstrip()) :], *found]))

    def relabel(self):
        """Change the unit's attributes that say that it is untranslated or approved."""
        was = tag = self.tree.tag(self.node)
        for name, old, new in LABELS:
            if self.node.attributes.get(name) == old:
                tag = with_attribute(tag, name, new)
        if tag != was:
            self.changes.append((self.node.begin, self.node.inside, [tag]))


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
    units, files = "trans-unit" if old else "segment", "file" if old else "xliff"
    nodes = [node for node in tree.root.nodes() if local(node) == units and not refused(node)]
    found = [Unit(tree, node, overwrite, old) for node in nodes]
    changes, kept = [change for one in found for change in one.changes], any(one.kept for one in found)
    key = "target-language" if old else "trgLang"
    for node in tree.root.nodes():
        if local(node) == files and declared(node.attributes.get(key, ""), target, kept):
            tag = with_attribute(tree.tag(node), key, two_letters(target).replace("_", "-"))
            changes.append((node.begin, node.inside, [tag]))
    return tree.spliced(0, len(tree.data), changes)
