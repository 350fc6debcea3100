"""Books (.epub): chapters (as HTML), the table of contents, and the declared language."""

import posixpath
from urllib.parse import unquote

from . import pages
from .archive import Archive, Flow
from .languages import right_to_left, two_letters
from .lines import Line
from .xmltree import Tree, escape, with_attribute


def unpack(data, source=None, target=None):
    archive = Archive(data)
    if "META-INF/rights.xml" in archive.names:
        raise ValueError("protected by digital rights management")
    flow = Flow(archive)
    container = Tree(archive.text("META-INF/container.xml")).root
    books = [unquote(rootfile.attributes.get("full-path", "")) for rootfile in container.nodes("rootfile")]
    for book in dict.fromkeys(books):
        if book in archive.names:
            package(archive, flow, book, source, target)
    if not flow.members:
        raise ValueError("not an EPUB book")
    return flow.parts(), flow.finish


def local(node):
    return node.name.split(":")[-1]


def package(archive, flow, book, source, target):
    tree = Tree(archive.text(book))
    changes, done = [], {name for name, _ in flow.members}
    for node in tree.root.nodes():
        if local(node) == "language" and target:
            changes.append((node.inside, node.inside_end, [two_letters(target).replace("_", "-")]))
        elif local(node) == "spine" and right_to_left(target):
            tag = with_attribute(tree.tag(node), "page-progression-direction", "rtl")
            changes.append((node.begin, node.inside, [tag]))
        if local(node) != "item":
            continue
        name = posixpath.normpath(posixpath.join(posixpath.dirname(book), unquote(node.attributes.get("href", ""))))
        kind = node.attributes.get("media-type")
        if name not in archive.names or name in done:
            continue
        done.add(name)
        if kind == "application/xhtml+xml":
            flow.member(name, pages.parts(archive.text(name), source, target))
        elif kind == "application/x-dtbncx+xml":
            flow.member(name, contents(archive.text(name)))
    flow.member(book, tree.spliced(0, len(tree.data), changes))


def contents(text):
    tree = Tree(text)
    changes = [
        (node.inside, node.inside_end, [Line([" ".join(node.text().split())], escape)])
        for node in tree.root.nodes()
        if local(node) == "text" and node.text().strip() and not any(True for _ in node.nodes())
    ]
    return tree.spliced(0, len(tree.data), changes)
