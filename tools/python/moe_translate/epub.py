"""Books (.epub): chapters (as HTML), the table of contents, and the declared language."""

import posixpath
from urllib.parse import unquote

from . import pages
from .archive import Archive, Flow
from .languages import right_to_left, same_language, two_letters
from .lines import Line
from .xmltree import escape, with_attribute


def unpack(data, source=None, target=None):
    archive = Archive(data)
    if "META-INF/rights.xml" in archive.names:
        raise ValueError("protected by digital rights management")
    flow = Flow(archive)
    container = archive.tree("META-INF/container.xml").root
    books = [unquote(rootfile.attributes.get("full-path", "")) for rootfile in container.nodes("rootfile")]
    for book in dict.fromkeys(books):
        if book in archive.names:
            package(archive, flow, book, source, target)
    if not flow.members:
        raise ValueError(f"not an EPUB book: {' '.join(books) or 'its package file'} is missing")
    return flow.parts(), flow.finish


def local(node):
    return node.name.split(":")[-1]


def package(archive, flow, book, source, target):
    tree = archive.tree(book)
    changes, done, first = [], {name for name, _ in flow.members}, None
    for node in tree.root.nodes():
        if local(node) == "language" and target:
            first = first or node.text().strip()
            if same_language(node.text().strip(), first):
                changes.append((node.inside, node.inside_end, [tag_of(target)]))
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
            flow.member(name, contents(archive.tree(name), target))
    flow.member(book, tree.spliced(0, len(tree.data), changes))


def contents(tree, target):
    changes, language = [], None
    for node in tree.root.nodes():
        name, old = local(node), node.attributes.get("xml:lang")
        if name == "text" and node.text().strip() and not any(True for _ in node.nodes()):
            changes.append((node.inside, node.inside_end, [Line([" ".join(node.text().split())], escape)]))
        elif old and target:
            language = language or old
            tag = with_attribute(tree.tag(node), "xml:lang", tag_of(target))
            changes += [(node.begin, node.inside, [tag])] if same_language(old, language) else []
    return tree.spliced(0, len(tree.data), changes)


def tag_of(target):
    return two_letters(target).replace("_", "-")
