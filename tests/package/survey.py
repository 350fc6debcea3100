"""survey(kind, bytes) counts the parts of a document that translation must keep: elements with attributes, keys, cells,
placeholders, links, pictures, the bytes of archive members without text, and texts with words. It shares no libraries
and no expressions with the package.
"""

import csv
import html.parser
import io
import json
import posixpath
import re
import zipfile
from collections import Counter

import ruamel.yaml
from lxml import etree
from translate.storage import properties as toolkit

WORD = re.compile(r"[^\W\d_]")
PLACEHOLDER = re.compile(
    r"%(?:\d+\$|\(\w+\)|<\w+>|\{\w+\})?[-+#0 ]?\d*(?:\.\d+)?(?:ll?|h)?[sdiufxXgeEcr@](?![^\W\d_])|%\{\w+\}|%L?\d+|%n"
    r"|\$\{[^{}]*\}|\{\{[^{}]*\}\}|(?<!\{)\{\w*\}(?!\})|\$\w+\$|https?://[^\s<>\"']*[\w/]"
)


def has_words(text):
    return bool(WORD.search(text))


def signs(text):
    """Return the placeholders in a text."""
    return tuple(sorted(PLACEHOLDER.findall(text)))


# ---- XML ---------------------------------------------------------------


def name(element):
    """Return an element's name with its namespace, or the class of a comment or processing instruction."""
    return element.tag if isinstance(element.tag, str) else type(element).__name__


def attributes(element, but=()):
    return tuple(sorted((key, value) for key, value in element.attrib.items() if etree.QName(key).localname not in but))


def tree(data):
    return etree.fromstring(data, etree.XMLParser(resolve_entities=False, huge_tree=True))


# Elements not counted: translation may join or split runs, drop proofing marks, and add right-to-left marks.
RUNS = set(
    "r t rPr proofErr lastRenderedPageBreak lang noProof soft-page-break s b i sz szCs rFonts color rStyle bCs iCs u "
    "rtl strike caps smallCaps highlight vertAlign bidi kern shd bdr spacing position w webHidden".split()
)
PARAGRAPHS = {"p", "h"}


def office(data, texts):
    """Survey a zip file of XML files. `texts` matches the names of the members with text."""
    found = Counter()
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        for member in file.namelist():
            content = file.read(member)
            if not re.fullmatch(texts, member):
                found[member, content] += 1
                continue
            for element in tree(content).iter():
                tag = etree.QName(element).localname if isinstance(element.tag, str) else name(element)
                if tag not in RUNS:
                    found[member, name(element), attributes(element)] += 1
                if tag in PARAGRAPHS:
                    found[member, tag, has_words("".join(element.itertext()))] += 1
                if tag in ("delText", "instrText", "annotation"):
                    found[member, tag, "".join(element.itertext())] += 1
    return found


def docx(data):
    return office(data, r"word/(?:document|header\d*|footer\d*|footnotes|endnotes)\.xml")


def odt(data):
    return office(data, r"(?:content|styles)\.xml")


TEXTS = set("abbr alt aria-label content label placeholder summary title value id".split())  # ids may be of headings
BLOCKS = set("p li td th h1 h2 h3 h4 h5 h6 dt dd title a caption figcaption blockquote button option label".split())
KEPT = set("code pre script style kbd".split())


class Census(html.parser.HTMLParser):
    """Count the tags, untranslated attributes, code and comments of a page, and the blocks with words."""

    def __init__(self, page, but=()):
        super().__init__(convert_charrefs=True)
        self.found, self.open, self.spoken, self.but = Counter(), [], Counter(), but
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        kept = tuple((key, None if key in TEXTS else value) for key, value in attrs if key not in self.but)
        self.found[tag, kept] += 1
        if tag in BLOCKS | KEPT:
            self.open.append([tag, ""])

    def handle_endtag(self, tag):
        self.found["/" + tag] += 1
        if tag in [opened for opened, _ in self.open]:
            while self.open:
                opened, text = self.open.pop()
                if opened in KEPT:
                    self.found[opened, " ".join(text.split())] += 1
                elif has_words(text):
                    self.spoken[opened] += 1
                if opened == tag:
                    break

    def handle_data(self, data):
        for block in self.open:
            block[1] += data

    def handle_comment(self, data):
        self.found["!", data] += 1

    def all(self):
        return self.found + self.spoken


def page(data):
    return Census(data.decode()).all()


def epub(data):
    """Survey the chapters and the table of contents of a book as XML, and the bytes of its other members."""
    found, language = Counter(), ("lang", "xml:lang", "dir")
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        first = file.infolist()[0]
        found["first", first.filename, first.compress_type] += 1
        for member in file.namelist():
            content, ending = file.read(member), posixpath.splitext(member)[1]
            if ending in (".xhtml", ".html", ".htm"):
                tree(content)
                page_of = Census(content.decode(), language).all()
                found += Counter({(member, str(key)): number for key, number in page_of.items()})
            elif ending in (".ncx", ".opf"):
                for element in tree(content).iter():
                    found[member, name(element), attributes(element, ["page-progression-direction"])] += 1
                    if not name(element).endswith("}language"):
                        found[member, name(element), has_words(element.text or "")] += 1
            else:
                found[member, content] += 1
    return found


def xliff(data):
    """Survey units and their sources; assert that targets have the inline elements and placeholders of the sources."""
    found = Counter()
    for element in tree(data).iter():
        tag = etree.QName(element).localname if isinstance(element.tag, str) else ""
        if tag in ("file", "xliff"):
            found[tag, attributes(element, ["target-language", "trgLang"])] += 1
        elif tag in ("trans-unit", "segment"):
            parts = {etree.QName(child).localname: child for child in element if isinstance(child.tag, str)}
            source = parts["source"]
            text = "".join(source.itertext())
            found[tag, attributes(element), etree.tostring(source, with_tail=False)] += 1
            target = parts.get("target")
            if target is not None and "".join(target.itertext()).strip():
                inside = [sorted((x.tag, attributes(x)) for x in at.iter() if x is not at) for at in (source, target)]
                assert inside[0] == inside[1] or target.get("state") != "needs-review-translation", (text, inside)
                if target.get("state") == "needs-review-translation":
                    assert signs("".join(target.itertext())) == signs(text), (text, "".join(target.itertext()))
        elif tag not in ("target", "source") and element.getparent() is not None and not inside_text(element):
            found[name(element), attributes(element), element.text] += 1
    return found


def inside_text(element):
    return any(etree.QName(up).localname in ("target", "source") for up in element.iterancestors())


def android(data):
    found = Counter()
    root = tree(data)
    for number, element in enumerate(root.iter()):
        whole = not isinstance(element.tag, str)
        found[number, name(element), attributes(element), element.text if whole else ""] += 1
    for child in root:
        for text in [child] if child.tag == "string" else child:
            content = "".join(text.itertext())
            found[child.get("name"), has_words(content), signs(content), content.count("\\n")] += 1
    return found


def qt(data):
    found = Counter()
    for message in tree(re.sub(rb"<!DOCTYPE[^>]*>", b"", data)).iter("message"):
        for part in message:
            if part.tag != "translation":
                found[part.tag, attributes(part), part.text] += 1
        source, translation = message.findtext("source") or "", message.find("translation")
        text = "" if translation is None else "".join(translation.itertext())
        if text.strip() and translation.get("type") == "unfinished" and not message.get("numerus"):
            assert signs(text) == signs(source) and text.count("\n") == source.count("\n"), (source, text)
    return found


# ---- Others ------------------------------------------------------------


def values(value, path=()):
    """Yield each leaf of nested dicts and lists with its path."""
    if isinstance(value, dict):
        yield path, "{"
        for key, inner in value.items():
            yield from values(inner, (*path, str(key)))
    elif isinstance(value, list):
        yield path, "["
        for at, inner in enumerate(value):
            yield from values(inner, (*path, at))
    else:
        yield path, value


def leaves(value):
    found = Counter()
    for path, leaf in values(value):
        text = isinstance(leaf, str) and path and leaf not in ("{", "[")
        found[(path, has_words(leaf), signs(leaf), leaf.count("\n")) if text else (path, repr(leaf))] += 1
    return found


def strings_json(data):
    """Survey a JSON file with comments, which are lines that start with //."""
    comment = re.compile(r"^\s*//.*$", re.M)
    text = data.decode("utf-8-sig")
    return leaves(json.loads(comment.sub("", text), strict=False)) + Counter(comment.findall(text))


def strings_yaml(data):
    value = ruamel.yaml.YAML(typ="safe", pure=True).load(data.decode("utf-8-sig"))
    if isinstance(value, dict) and len(value) == 1 and re.fullmatch(r"[a-z]{2}(-[A-Z]{2})?", str(next(iter(value)))):
        value = {"locale": next(iter(value.values()))}
    return leaves(value) + Counter(re.findall(r"^\s*#.*$", data.decode("utf-8-sig"), re.M))


def table(data):
    text = data.decode("utf-8-sig")
    delimiter = max("\t;,|", key=text.split("\n")[0].count)
    found = Counter()
    for row, cells in enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)):
        found[row, len(cells)] += 1
        for column, cell in enumerate(cells):
            spoken = has_words(cell)
            found[row, column, spoken or cell, signs(cell)] += 1
    return found


def properties(data):
    utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        text = data.decode("utf-16" if utf16 else "utf-8")
    except UnicodeDecodeError:
        text = data.decode("iso-8859-1")
    store = toolkit.javautf8file()
    store.parse(text.encode("utf-8"))
    found = Counter([data[:2] if utf16 else b""])
    for unit in store.units:
        found[unit.name, has_words(unit.value), signs(unit.value), unit.getnotes()] += 1
    return found


def subtitles(data):
    text = data.decode("utf-8-sig")
    found = Counter()
    for sign in (
        r"^[^\n]*(?:-->|\d\.\d\d\d,\d)[^\n]*$",
        r"^\s*\d+\s*$",
        r"<[^<>\n]*>",
        r"^(?:<\w>)*[-–—]",
        r"\{[^}\n]*\}",
    ):
        found += Counter(re.findall(sign, text, re.M))
    for number, block in enumerate(re.split(r"\n\s*\n", text)):
        found[number, has_words(block)] += 1
    found[text.startswith("WEBVTT"), "\r\n" in text] += 1
    return found


SURVEYS = {
    "docx": docx,
    "odt": odt,
    "epub": epub,
    "xliff": xliff,
    "android": android,
    "qt": qt,
    "json": strings_json,
    "yaml": strings_yaml,
    "table": table,
    "properties": properties,
    "subtitles": subtitles,
    "html": page,
}


def survey(kind, data):
    return SURVEYS[kind](data)
