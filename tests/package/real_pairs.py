"""pairs(kind, before, after) yields (place, source text, translated text) of each text of a document.

A text is a list of items: strings, and (sign, name) for markup, where sign is "(" for the begin of a pair, ")" for its
end and "." for a single mark. The module shares no code with the package. It raises Damaged if the translated document
lacks texts of the source, or has other keys, cells, cues or blocks.
"""

import csv
import html.parser
import io
import json
import posixpath
import re
import zipfile
from collections import Counter

import yaml
from lxml import etree

TAG = re.compile(r"<(/?)([A-Za-z][\w:.-]*)([^<>]*?)(/?)>|<(/)>")
VOID = set("area base br col embed hr img input link meta param source track wbr".split())


class Damaged(Exception):
    """The translated document's structure differs from its source's."""


def items(text):
    """Return a text as items, with tags such as <b> as marks."""
    closed = {tag[2].lower() for tag in TAG.finditer(text) if tag[1]}
    found, end = [], 0
    for tag in TAG.finditer(text):
        name = (tag[2] or "").lower()
        pair = name in closed and name not in VOID and not tag[4]
        sign = ")" if tag[1] or tag[5] else "(" if pair else "."
        mark = name if sign == ")" else name + tag[3].rstrip() if pair else tag[0]
        found += [text[end : tag.start()], (sign, mark)]
        end = tag.end()
    return [item for item in [*found, text[end:]] if item]


def zipped(kind, old, new):
    """Yield pairs of texts at the same places in two lists of (place, items)."""
    if [place for place, _ in old] != [place for place, _ in new]:
        more, less = Counter(place for place, _ in new), Counter(place for place, _ in old)
        raise Damaged(
            f"{kind}: lost {list(less - more)[:3]}, new {list(more - less)[:3]}, {len(old)} and {len(new)} texts"
        )
    for (place, one), (_, other) in zip(old, new, strict=True):
        yield place, one, other


def tree(data):
    return etree.fromstring(data, etree.XMLParser(resolve_entities=False, huge_tree=True, strip_cdata=False))


def local(element):
    return etree.QName(element).localname if isinstance(element.tag, str) else ""


def attributes(element, but=()):
    return " ".join(f"{etree.QName(k).localname}={v}" for k, v in sorted(element.attrib.items()) if k not in but)


# ---- Pages -------------------------------------------------------------

INLINE = set(
    "a abbr acronym b bdi bdo big br button cite code data del dfn em font i img ins kbd label map mark math nobr "
    "object q rp rt ruby s samp script select small span strike strong sub sup svg time tt u var wbr input".split()
)
KEPT = set("code pre script style kbd samp svg math select textarea noscript template".split())
SHOWN = {"alt", "title", "placeholder", "aria-label"}


class Page(html.parser.HTMLParser):
    """The texts of a page between its blocks."""

    def __init__(self, text, where=""):
        super().__init__(convert_charrefs=True)
        self.texts, self.at, self.kept, self.where, self.path = [], [], 0, where, []
        self.feed(text)
        self.close()
        self.block()

    def block(self):
        if any(isinstance(item, str) and item.strip() for item in self.at):
            self.texts.append((self.where + "/".join(self.path[-3:]), self.at))
        self.at = []

    def handle_starttag(self, tag, attrs, single=False):
        if self.kept:
            self.kept += tag == self.name
            return
        for key, value in attrs:
            if key in SHOWN and value:
                self.texts.append((f"{self.where}{tag}@{key}", [value]))
        name = tag + "".join(
            f" {key}={value}"
            for key, value in attrs
            if key not in SHOWN and key not in ("lang", "xml:lang", "dir", "id")
        )
        if tag not in INLINE:
            self.block()
        if tag in KEPT and not single:
            self.kept, self.name, self.mark, self.inside = 1, tag, name, ""
        elif tag in INLINE:
            self.at.append(("." if single or tag in VOID else "(", name))
        elif tag not in VOID and not single:
            self.path.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs, tag in VOID or tag in ("a", "span") and self.where.endswith("xhtml:"))

    def handle_endtag(self, tag):
        if self.kept:
            self.kept -= tag == self.name
            if not self.kept and tag in INLINE:
                self.at.append((".", f"{self.mark}>{' '.join(self.inside.split())}"))
            return
        if tag in INLINE and tag not in VOID:
            self.at.append((")", tag))
        elif tag not in INLINE:
            self.block()
            if tag in self.path:
                while self.path.pop() != tag:
                    pass

    def handle_data(self, data):
        if self.kept:
            self.inside += data
        else:
            self.at.append(re.sub(r"[ \t\r\n\f]+", " ", data))


def page(before, after):
    return zipped("page", Page(decoded(before)).texts, Page(decoded(after)).texts)


def decoded(data):
    said = re.search(rb"(?:charset|encoding)\s*=\s*[\"']?([\w-]+)", data[:2000])
    for name in ("utf-8-sig", said and said[1].decode(), "windows-1252", "latin-1"):
        try:
            return data.decode(name or "utf-8")
        except (UnicodeDecodeError, LookupError):
            pass
    raise Damaged("unknown encoding")


def markdown(before, after):
    import mistune  # only tools/install-deps --test-long installs it

    plugins = ["table", "strikethrough", "footnotes", "task_lists", "def_list"]
    render = mistune.create_markdown(escape=False, plugins=plugins)
    front = re.compile(r"\A---\n.*?\n---\n", re.S)
    old, new = (front.sub("", decoded(data)) for data in (before, after))
    return zipped("markdown", Page(render(old)).texts, Page(render(new)).texts)


def epub(before, after):
    for name, old, new in members(before, after):
        ending = posixpath.splitext(name)[1].lower()
        if ending in (".xhtml", ".html", ".htm"):
            tree(new)
            yield from zipped(name, Page(decoded(old), name + ":").texts, Page(decoded(new), name + ":").texts)
        elif ending == ".ncx":
            found = [
                [(at.getparent().tag, items(at.text or "")) for at in tree(data).iter("{*}text")] for data in (old, new)
            ]
            yield from zipped(name, *found)
        elif ending != ".opf" and old != new:
            raise Damaged(f"{name} changed")


def members(before, after):
    """Yield (name, bytes before, bytes after) of the members of two zip files."""
    with zipfile.ZipFile(io.BytesIO(before)) as old, zipfile.ZipFile(io.BytesIO(after)) as new:
        if new.testzip() or sorted(old.namelist()) != sorted(new.namelist()):
            raise Damaged(f"members: {sorted(set(old.namelist()) ^ set(new.namelist()))[:3]}")
        for name in old.namelist():
            yield name, old.read(name), new.read(name)


# ---- Office ------------------------------------------------------------

WORD_SINGLE = set(
    "footnoteReference endnoteReference commentReference sym object pict drawing oMath oMathPara ptab pgNum "
    "bookmarkStart bookmarkEnd commentRangeStart commentRangeEnd permStart permEnd footnoteRef endnoteRef".split()
)
WORD_PAIR = set("hyperlink sdt fldSimple smartTag ins moveTo customXml".split())
WORD_LEFT_OUT = set("del moveFrom rPr pPr sdtPr delText".split())


def word_items(node, found, deep):
    """Append the items of a Word paragraph. Append paragraphs inside it, e.g. of text boxes, to `deep`."""
    for child in node:
        tag = local(child)
        if tag == "p":
            deep.append(child)
        elif tag == "t":
            found.append(child.text or "")
        elif tag == "tab":
            found.append("\t")
        elif tag in ("br", "cr"):
            found.append("\n")
        elif tag == "noBreakHyphen":
            found.append("\u2011")
        elif tag == "fldChar":
            kind = next((v for k, v in child.attrib.items() if k.endswith("fldCharType")), "")
            found.append(({"begin": "(", "end": ")"}.get(kind, "."), "field" if kind != "separate" else "separate"))
        elif tag == "instrText":
            found.append((".", "instr " + (child.text or "").strip()))
        elif tag in WORD_SINGLE:
            found.append((".", f"{tag} {attributes(child)}"))
            deep += [at for at in child.iter("{*}p") if not any(local(up) == "p" for up in above(at, child))]
        elif tag in WORD_PAIR:
            found.append(("(", f"{tag} {attributes(child)}"))
            word_items(child, found, deep)
            found.append((")", tag))
        elif tag == "AlternateContent":  # its choices repeat one drawing
            found.append((".", tag))
            deep += [at for at in child.iter("{*}p") if not any(local(up) == "p" for up in above(at, child))]
        elif tag and tag not in WORD_LEFT_OUT:
            word_items(child, found, deep)


def above(node, end):
    node = node.getparent()
    while node is not None and node is not end:
        yield node
        node = node.getparent()


def paragraphs(name, root, reader, blocks=("p",)):
    """Return (place, items) of all paragraphs, outer ones before inner ones."""
    found = []
    waiting = [
        at for at in root.iter() if local(at) in blocks and not any(local(up) in blocks for up in at.iterancestors())
    ]
    while waiting:
        at, inside, deep = waiting.pop(0), [], []
        reader(at, inside, deep)
        found.append((f"{name} p{len(found) + 1}", [] if is_apart(at) else joined(inside)))
        waiting = deep + waiting
    return found


def is_apart(node):
    """Return whether a paragraph is code or part of a comment."""
    styles = [value for at in node.iterfind("{*}pPr/{*}pStyle") for value in at.attrib.values()]
    return any(re.search("code|verbatim", style, re.I) for style in styles) or any(
        local(up) == "annotation" for up in node.iterancestors()
    )


def joined(found):
    """Join neighbouring strings."""
    out = []
    for item in found:
        if isinstance(item, str) and out and isinstance(out[-1], str):
            out[-1] += item
        elif item:
            out.append(item)
    return out


def docx(before, after):
    for name, old, new in members(before, after):
        if re.fullmatch(r"word/(?:document|header\d*|footer\d*|footnotes|endnotes)\.xml", name):
            yield from zipped(name, *(paragraphs(name, tree(data), word_items) for data in (old, new)))
        else:
            reads(name, old, new)


def reads(name, old, new):
    """Raise an error if a member can no longer be read as XML."""
    if name.endswith((".xml", ".rels")) and old != new:
        tree(new)


def open_items(node, found, deep):
    if node.text:
        found.append(re.sub(r"\s+", " ", node.text))
    for child in node:
        tag = local(child)
        if tag in ("p", "h"):
            deep.append(child)
        elif tag == "s":
            found.append(" ")
        elif tag == "tab":
            found.append("\t")
        elif tag == "line-break":
            found.append("\n")
        elif tag == "soft-page-break":
            pass
        elif tag in ("span", "a", "ruby", "meta"):
            found.append(("(", f"{tag} {attributes(child)}"))
            open_items(child, found, deep)
            found.append((")", tag))
        elif tag:
            found.append((".", f"{tag} {attributes(child)}"))
            deep += [
                at for at in child.iter("{*}p", "{*}h") if not any(local(up) in ("p", "h") for up in above(at, child))
            ]
        if child.tail:
            found.append(re.sub(r"\s+", " ", child.tail))


def odt(before, after):
    for name, old, new in members(before, after):
        if name in ("content.xml", "styles.xml"):
            yield from zipped(name, *(paragraphs(name, tree(data), open_items, ("p", "h")) for data in (old, new)))
        else:
            reads(name, old, new)


def slide_items(node, found, deep):
    for run in node:
        tag = local(run)
        if tag == "br":
            found.append("\n")
        elif tag == "fld":
            found.append((".", f"fld {attributes(run)}"))
        elif tag == "r":
            link = next((attributes(at) for at in run.iter("{*}hlinkClick")), None)
            text = "".join(at.text or "" for at in run.iter("{*}t"))
            if link is not None and found[-1:] == [(")", "link " + link)]:
                found.pop()  # a link of several runs
            elif link is not None:
                found.append(("(", "link " + link))
            found.append(text)
            if link is not None:
                found.append((")", "link " + link))
        elif tag in ("AlternateContent", "m"):
            found.append((".", tag))


def pptx(before, after):
    for name, old, new in members(before, after):
        if re.fullmatch(r"ppt/(?:slides|notesSlides)/\w+\.xml", name):
            found = [
                [
                    (f"{name} p{number}", slide(at))
                    for number, at in enumerate(
                        tree(data).iter("{http://schemas.openxmlformats.org/drawingml/2006/main}p")
                    )
                ]
                for data in (old, new)
            ]
            yield from zipped(name, *found)
        else:
            reads(name, old, new)


def slide(node):
    found = []
    slide_items(node, found, [])
    return joined(found)


SHEET = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"


class Book:
    """The text cells of a workbook, and everything else in its sheets."""

    def __init__(self, data):
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            names = file.namelist()
            shared = next((name for name in names if name.lower().endswith("sharedstrings.xml")), None)
            strings = [self.rich(si) for si in tree(file.read(shared)).iter(SHEET + "si")] if shared else []
            self.texts, self.rest, self.names = {}, Counter(), {}
            for name in names:
                if re.fullmatch(r"xl/worksheets/[^/]+\.xml", name):
                    self.sheet(name, tree(file.read(name)), strings)
                elif re.fullmatch(r"xl/tables/[^/]+\.xml", name):
                    root = tree(file.read(name))
                    self.names[name] = root.get("ref"), [at.get("name") for at in root.iter(SHEET + "tableColumn")]
                elif name == "xl/workbook.xml":
                    root = tree(file.read(name))
                    self.rest.update(
                        ("name", attributes(at), at.text) for at in root.iter(SHEET + "sheet", SHEET + "definedName")
                    )

    @staticmethod
    def rich(node):
        return joined([at.text or "" for at in node.iter(SHEET + "t") if local(at.getparent()) != "rPh"])

    def sheet(self, name, root, strings):
        for cell in root.iter(SHEET + "c"):
            kind, value = cell.get("t"), cell.findtext(SHEET + "v")
            place = f"{name}!{cell.get('r')}"
            formula = cell.findtext(SHEET + "f")
            self.rest[place, formula, kind in ("s", "inlineStr")] += 1
            if kind == "s" and value is not None:
                self.texts[place] = strings[int(value)]
            elif kind == "inlineStr":
                self.texts[place] = self.rich(cell)
            else:
                self.rest[place, kind, value] += 1


def xlsx(before, after):
    old, new = Book(before), Book(after)
    if old.rest != new.rest:
        raise Damaged(
            f"cells, formulas or names: lost {list(old.rest - new.rest)[:3]}, new {list(new.rest - old.rest)[:3]}"
        )
    for name, (ref, columns) in new.names.items():
        texts = {"".join(text) for text in new.texts.values()}
        lost = [
            column
            for column in columns
            if re.sub(r"_x000[aA]_", "\n", column) not in texts and not re.fullmatch(r"Column\d+", column)
        ]
        if lost and old.names[name][1] != lost:
            raise Damaged(f"{name} {ref}: column names {lost[:3]} are in no cell")
    seen = set()
    for place, source in old.texts.items():
        if place not in new.texts:
            raise Damaged(f"{place}: no text any more")
        if (key := "".join(source)) not in seen:
            seen.add(key)
            yield place, source, new.texts[place]


# ---- Strings -----------------------------------------------------------

QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def po_entries(data):
    """Return (flags, {key: text}) of the entries of a PO file that are not obsolete."""
    found, at, flags, last = [], {}, "", None
    for line in [*decoded(data).splitlines(), ""]:
        start = re.match(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)\s*"', line)
        if not line.strip() or line.startswith("#"):
            if at and "msgid" in at:
                found.append((flags, at))
                at, flags = {}, ""
            flags += line if line.startswith("#,") else ""
        if start and start[1] == "msgid" and "msgid" in at or start and start[1] == "msgctxt" and "msgid" in at:
            found.append((flags, at))
            at, flags = {}, ""
        if start:
            last = start[1]
        if start or line.startswith('"'):
            text = "".join(QUOTED.findall(line))
            at[last] = at.get(last, "") + re.sub(
                r"\\(.)", lambda m: {"n": "\n", "t": "\t", "r": "\r"}.get(m[1], m[1]), text
            )
    return found


def po(before, after):
    old, new = po_entries(before), po_entries(after)
    if [(e.get("msgctxt"), e["msgid"]) for _, e in old] != [(e.get("msgctxt"), e["msgid"]) for _, e in new]:
        raise Damaged(f"po: {len(old)} and {len(new)} entries")
    for (_, was), (_, entry) in zip(old, new, strict=True):
        if not entry["msgid"]:
            continue
        for key, text in entry.items():
            if key.startswith("msgstr") and not was.get(key):
                source = entry["msgid"] if key in ("msgstr", "msgstr[0]") else entry.get("msgid_plural", "")
                place = entry.get("msgctxt", "") + "|" + entry["msgid"][:40]
                yield place, items(source), items(text)
                if text and (
                    source.endswith("\n") != text.endswith("\n") or source.startswith("\n") != text.startswith("\n")
                ):
                    raise Damaged(f"{place}: line break at an end")


def xliff_items(node):
    """Return the items of a source or target. Paired codes have the same name."""
    found = [node.text or ""]
    for child in node:
        tag, key = local(child), child.get("id", "") or child.get("mid", "")
        if tag in ("g", "pc", "mrk"):
            found += [("(", f"{tag} {attributes(child)}"), *xliff_items(child), (")", tag)]
        elif tag in ("bpt", "sc", "bx"):
            found.append(("(", f"code {child.get('rid') or key}"))
        elif tag in ("ept", "ec", "ex"):
            found.append((")", f"code {child.get('startRef') or child.get('rid') or key}"))
        elif tag == "it":
            found.append((".", f"it {attributes(child)}"))
        elif tag == "x" and key.startswith("START_") and not key.startswith("START_BLOCK"):
            found.append(("(", "x " + key[6:]))
        elif tag == "x" and key.startswith("CLOSE_") and not key.startswith("CLOSE_BLOCK"):
            found.append((")", "x " + key[6:]))
        elif tag:
            found.append((".", f"{tag} {attributes(child)} {''.join(child.itertext())}"))
        found.append(child.tail or "")
    return joined(found)


def segments_of(node):
    """Return {mid: items} of the segments of a seg-source or target, or {None: items}."""
    marks = [at for at in node.iter("{*}mrk") if at.get("mtype") == "seg"]
    return {at.get("mid"): xliff_items(at) for at in marks} or {None: xliff_items(node)}


def spoken(node):
    return node is not None and "".join(node.itertext()).strip()


def xliff(before, after):
    units = [[at for at in tree(data).iter("{*}trans-unit", "{*}segment")] for data in (before, after)]
    if [attributes(at, ("state", "approved", "subState")) for at in units[0]] != [
        attributes(at, ("state", "approved", "subState")) for at in units[1]
    ]:
        raise Damaged(f"xliff: {len(units[0])} and {len(units[1])} units or other attributes")
    for was, unit in zip(*units, strict=True):
        source, target = unit.find("{*}source"), unit.find("{*}target")
        key = unit.get("id") or unit.getparent().get("id") or ""
        if etree.tostring(was.find("{*}source"), with_tail=False) != etree.tostring(source, with_tail=False):
            raise Damaged(f"{key}: source changed")
        if unit.get("translate") == "no" or spoken(was.find("{*}target")):
            continue
        cut = unit.find("{*}seg-source")
        if target is None:
            yield key, xliff_items(source), []
            continue
        sources = segments_of(cut if cut is not None else source)
        targets = segments_of(target)
        if spoken(target) and set(sources) != set(targets) and set(sources) != {None}:
            raise Damaged(f"{key}: segments {sorted(map(str, sources))} became {sorted(map(str, targets))}")
        for mid, one in sources.items():
            yield f"{key} {mid or ''}", one, targets.get(mid, [])


def android(before, after):
    def texts(data):
        for at in tree(data).iter("string", "item"):
            if at.getparent().tag in ("resources", "string-array", "plurals"):
                name = (
                    at.get("name") or f"{at.getparent().get('name')} {at.get('quantity') or at.getparent().index(at)}"
                )
                text = re.sub(
                    r"\A<[^<>]*>|</(?:string|item)>\Z", "", etree.tostring(at, encoding="unicode", with_tail=False)
                )
                text = re.sub(r"<!\[CDATA\[(.*?)\]\]>", lambda m: m[1], text, flags=re.S)
                text = (
                    re.sub(r' xmlns:\w+="[^"]*"', "", text)
                    .replace("&lt;", "<")
                    .replace("&gt;", ">")
                    .replace("&amp;", "&")
                )
                yield (
                    name,
                    items(re.sub(r"""\\(['"@?])""", r"\1", text).replace("\\n", "\n")),
                    at.get("translatable") == "false",
                )

    old, new = list(texts(before)), list(texts(after))
    for (_, one, fixed), (_, other, _) in zip(old, new, strict=False):
        if fixed and one != other:
            raise Damaged("android: a text that is not translatable changed")
    return zipped("android", [at[:2] for at in old if not at[2]], [at[:2] for at in new if not at[2]])


def qt(before, after):
    messages = [list(tree(re.sub(rb"<!DOCTYPE[^>]*>", b"", data)).iter("message")) for data in (before, after)]
    if [at.findtext("source") for at in messages[0]] != [at.findtext("source") for at in messages[1]]:
        raise Damaged("qt: other messages")
    for was, message in zip(*messages, strict=True):
        before_, target = was.find("translation"), message.find("translation")
        if spoken(before_) or before_ is not None and before_.get("type") in ("vanished", "obsolete"):
            continue
        source = items(message.findtext("source") or "")
        forms = target.findall("numerusform") if target is not None else []
        for form in forms or [target]:
            yield "".join(map(str, source))[:40], source, items("" if form is None else "".join(form.itertext()))


def leaves(value, path=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{at}]")
    else:
        yield path, value


def strings(kind, old, new, shown=lambda path: True):
    """Yield pairs of strings of two trees of dicts and lists."""
    lists = [list(leaves(value)) for value in (old, new)]
    for (path, one), (_, other) in zip(*lists, strict=False):
        if not isinstance(one, str) and one != other:
            raise Damaged(f"{kind}: {path}: {one!r} became {other!r}")
    pairs_ = zipped(
        kind, *([(path, items(leaf) if isinstance(leaf, str) else []) for path, leaf in each] for each in lists)
    )
    return [at for at in pairs_ if at[1] and shown(at[0])]


def strings_json(before, after):
    """Yield the strings of JSON; for ARB and WebExtensions, only those that users see."""
    comment = re.compile(r"^\s*//.*$", re.M)
    old, new = (json.loads(comment.sub("", data.decode("utf-8-sig")), strict=False) for data in (before, after))
    extension = isinstance(old, dict) and old and all(isinstance(at, dict) and "message" in at for at in old.values())
    arb = isinstance(old, dict) and any(key.startswith("@") for key in old)
    for path, one, other in strings("json", old, new):
        if extension and not path.endswith(".message") or arb and path.startswith(".@"):
            if one != other and path != ".@@locale":
                raise Damaged(f"{path}: {one} became {other}")
        else:
            yield path, one, other


class Loader(yaml.SafeLoader):
    """A loader that treats Ruby symbols as strings."""


Loader.add_multi_constructor("!", lambda loader, suffix, node: f"!{suffix} {getattr(node, 'value', '')}")


def strings_yaml(before, after):
    old, new = (yaml.load(data.decode("utf-8-sig"), Loader) for data in (before, after))  # noqa: S506 - a safe loader
    if isinstance(old, dict) and isinstance(new, dict) and len(old) == len(new) == 1:
        old, new = next(iter(old.values())), next(iter(new.values()))
    return strings("yaml", old, new)


def properties(before, after):
    def texts(data):
        text = data.decode("utf-16") if data[:2] in (b"\xff\xfe", b"\xfe\xff") else decoded(data)
        text = re.sub(r"\\\r?\n[ \t]*", "", "\n".join(line.rstrip("\r") for line in text.split("\n")))
        for line in text.split("\n"):
            found = re.match(r"[ \t\f]*((?:\\.|[^\\\s:=#!])(?:\\.|[^\\\s:=])*)[ \t]*[:= \t]?[ \t]*(.*)", line)
            if found:
                value = re.sub(r"\\u([0-9a-fA-F]{4})", lambda m: chr(int(m[1], 16)), found[2])
                yield found[1], items(re.sub(r"\\([nrt])", "\n", value).replace("\\", ""))

    return zipped("properties", *(list(texts(data)) for data in (before, after)))


def table(before, after):
    def texts(data):
        text = decoded(data)
        delimiter = max("\t;,|", key=text.split("\n")[0].count)
        for row, cells in enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)):
            for column, cell in enumerate(cells):
                yield f"row {row} column {column}", items(cell)

    return zipped("table", *(list(texts(data)) for data in (before, after)))


# ---- Others ------------------------------------------------------------

TIMES = re.compile(r"-->|^\d+:\d\d:\d\d[.,]\d+,\d+:\d\d:\d\d[.,]\d+")


def subtitles(before, after):
    def texts(data):
        text = decoded(data).replace("\r\n", "\n")
        if re.search(r"^\[Script Info\]", text):
            for line in text.split("\n"):
                found = re.match(r"(Dialogue:(?:[^,]*,){9})(.*)", line)
                if found:
                    yield found[1], ass_items(found[2])
                elif line.strip() and not line.startswith("Dialogue"):
                    yield line, []
            return
        for block in re.split(r"\n\s*\n", text):
            lines = block.split("\n")
            at = next((n for n, line in enumerate(lines) if TIMES.search(line)), None)
            if at is None:  # a cue without times, or a note
                number = lines[0] if lines[0].strip().isdigit() else ""
                yield (number, items(" ".join(lines[1:]))) if number else (block, [])
            else:
                yield "\n".join(lines[: at + 1]), items(" ".join(lines[at + 1 :]))

    return zipped("subtitles", *(list(texts(data)) for data in (before, after)))


def ass_items(text):
    found = []
    for part in re.split(r"(\{[^}]*\}|\\[Nnh])", text):
        found.append(" " if re.fullmatch(r"\\[Nnh]", part) else (".", part) if part.startswith("{") else part)
    return joined(found)


def lines(before, after):
    old, new = (decoded(data).split("\n") for data in (before, after))
    return zipped("text", *([(f"line {n + 1}", items(line)) for n, line in enumerate(each)] for each in (old, new)))


READERS = {
    "text": lines, "html": page, "markdown": markdown, "epub": epub, "docx": docx, "odt": odt, "pptx": pptx,
    "xlsx": xlsx, "po": po, "xliff": xliff, "android": android, "qt": qt, "json": strings_json, "yaml": strings_yaml,
    "properties": properties, "table": table, "subtitles": subtitles,
}  # fmt: skip


def pairs(kind, before, after):
    return READERS[kind](before, after)
