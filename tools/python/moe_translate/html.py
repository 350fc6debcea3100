"""HTML: texts and some attributes are translated, every other byte stays.

The cutting follows the tokeniser of the HTML standard, as tools/server/html.c does; tests/package/html_cases.json holds
what both must do. It builds no tree and calls nothing for each depth, so no page is too deep or too long for it.
"""

import html
import re

from .inline import Tag, Text, cut
from .segments import Segment

INLINE = set(
    "a abbr acronym b bdi bdo big cite data del dfn em font i ins label mark q s small span strike strong sub "
    "sup time tt u".split()
)
EMPTY = set("img wbr input".split())  # inline, without a content of their own
WHOLE = set("code kbd samp var".split())  # inline, content and all not to be translated
SKIPPED = set("script style pre textarea template svg math noscript xmp iframe noembed noframes".split())
RAW = set("script style textarea title xmp iframe noembed noframes noscript".split())  # no tags inside
VOID = set("area base br col embed hr img input link meta source track wbr".split())
ATTRIBUTES = set("alt title placeholder aria-label".split())
METAS = set("description keywords og:title og:description twitter:title twitter:description".split())
BLOCKS = (
    "address article aside blockquote center details dialog dir div dl fieldset figcaption figure footer form h1 h2 h3 "
    "h4 h5 h6 header hgroup hr main menu nav ol p pre search section summary table ul"
)
CELLS = "tbody thead tfoot tr"
# An element whose end tag may be left out: the start tags and the end tags that end it, and what counts as inside.
ENDED = {
    "p": (BLOCKS, BLOCKS.replace(" p ", " ") + " li dd dt td th body html button caption", ""),
    "li": ("li", "ul ol menu", "ul ol menu"),
    "dt": ("dt dd", "dl", "dl"),
    "dd": ("dt dd", "dl", "dl"),
    "td": ("td th " + CELLS, "table " + CELLS, "table"),
    "th": ("td th " + CELLS, "table " + CELLS, "table"),
    "tr": (CELLS, "table tbody thead tfoot", "table"),
    "option": ("option optgroup", "select optgroup datalist", ""),
}
ENDED = {name: tuple(set(names.split()) for names in lists) for name, lists in ENDED.items()}
TAG_NAME = re.compile(r"</?([a-zA-Z][^\s/>]*)")
ATTRIBUTE = re.compile(
    r"""[\s/]*(?P<name>[^\s/>][^\s/>=]*)(?:\s*=\s*(?:"(?P<double>[^"]*)(?:"|\Z)|'(?P<single>[^']*)(?:'|\Z)"""
    r"""|(?P<bare>[^\s>"'][^\s>]*)?))?"""
)
FILLING = re.compile(r"[\s/]*")
MARKUP = re.compile(r"<(?=[a-zA-Z!?]|/.)", re.S)
COMMENT_END = re.compile(r"--!?>")
REFERENCE = re.compile(r"&(?:#[0-9]+;?|#[xX][0-9a-fA-F]+;?|[a-zA-Z][a-zA-Z0-9]*;?)|[^&]+|&", re.S)
TEMPLATE = re.compile(r"\{[%{#]|<[?%]")


class Markup:
    """A tag, or what is none: name "" then. `spots`: attribute -> (value, begin, end), the quotes left out."""

    def __init__(self, data, at):
        self.begin, self.spots, self.name, self.closes, self.empty = at, {}, "", False, False
        named = TAG_NAME.match(data, at)
        if not named:
            self.end = end_of_other(data, at)
            return
        self.name, self.closes = named[1].lower(), data[at + 1] == "/"
        at = named.end()
        while at < len(data):
            at = FILLING.match(data, at).end()
            if data[at : at + 1] in ("", ">"):
                break
            match = ATTRIBUTE.match(data, at)
            for group in ("double", "single", "bare"):
                if match[group] is not None:
                    self.spots.setdefault(match["name"].lower(), (match[group], *match.span(group)))
            self.spots.setdefault(match["name"].lower(), ("", match.end(), match.end()))
            at = match.end()
        self.end = min(at + 1, len(data))
        self.empty = self.name in VOID or (self.name in ("svg", "math") and data[at - 1 : at + 1] == "/>")

    def value(self, name):
        return html.unescape(self.spots.get(name, ("",))[0])

    @property
    def kept(self):
        """Whether the author wants it as it is."""
        return self.value("translate").lower() == "no" or "notranslate" in self.value("class").lower().split()


def end_of_other(data, at):
    """Behind a comment, a declaration or the like."""
    if data.startswith("<!--", at):
        if data.startswith(("<!-->", "<!--->"), at):
            return data.index(">", at) + 1
        found = COMMENT_END.search(data, at + 4)
        return found.end() if found else len(data)
    end = data.find(">", at)
    if data.startswith(("<?php", "<?=", "<%"), at) and end >= 0:
        end = data.find("?>", at)
        end = end + 1 if end >= 0 else -1
    return end + 1 if end >= 0 else len(data)


def end_tag(data, at, name):
    """Where the end tag of a name begins, or the document's end."""
    found = re.compile(rf"</{re.escape(name)}(?=[\s/>]|\Z)", re.I).search(data, at)
    return found.start() if found else len(data)


def end_of_kept(data, at, name):
    """Behind an element that is kept, whose content begins at `at`."""
    depth, nested = 1, 0
    starts, ends, inside = ENDED.get(name, ((), (), ()))
    if name in RAW:
        at = end_tag(data, at, name)
    while found := MARKUP.search(data, at):
        tag = Markup(data, found.start())
        if not nested and depth == 1 and tag.name != "" and tag.name in (ends if tag.closes else starts):
            return tag.begin
        if tag.name in inside:
            nested += -1 if tag.closes else 1
        if tag.name == name and not tag.empty and not nested:
            depth += -1 if tag.closes else 1
        at = tag.end
        if not depth:
            return at
        if tag.name in RAW and not tag.closes and tag.name != name:
            at = end_tag(data, at, tag.name)
    return len(data)


def wanted_attributes(tag):
    """Names of the attributes that a reader sees."""
    if tag.closes or tag.kept or tag.name in SKIPPED - {"textarea"}:
        return []
    found = ATTRIBUTES & tag.spots.keys()
    if tag.name == "input" and tag.value("type").lower() in ("submit", "button", "reset"):
        found |= {"value"} & tag.spots.keys()
    if tag.name == "input" and tag.value("type").lower() != "image":
        found -= {"alt"}
    if tag.name == "meta" and METAS & {tag.value("name").lower(), tag.value("property").lower()}:
        found |= {"content"} & tag.spots.keys()
    return sorted(found, key=lambda name: tag.spots[name][1])


class Attribute(Segment):
    """A value that keeps its bytes unless its words change."""

    def __init__(self, raw):
        self.raw, self.plain = raw, html.unescape(raw)
        super().__init__([self.plain], attribute_text)

    def original(self):
        return self.raw

    def _whole(self, raw):
        whole = super()._whole(raw)
        return self.raw if html.unescape(whole) == self.plain else whole


def attribute_parts(data, tag, languages):
    """A tag with its attributes that are to be translated as segments of their own."""
    parts, at = [], tag.begin
    for name in wanted_attributes(tag):
        value, begin, end = tag.spots[name]
        if value and begin < end and data[begin - 1] in "\"'" and not TEMPLATE.search(value):
            parts += [data[at:begin], Attribute(value)]
            at = end
    if tag.name == "html" and languages and not tag.closes:
        value, begin, end = tag.spots.get("lang", ("", 0, 0))
        if value and value.lower().split("-")[0] == languages[0].lower().split("-")[0]:
            parts += [data[at:begin], languages[1]]
            at = end
    return [*parts, data[at : tag.end]] if parts else []


def attribute_text(text):
    return html.escape(text, quote=True)


def body_text(text):
    return html.escape(text, quote=False)


def text_of(raw):
    """A text as a reader sees it; each of its characters knows how it is written."""
    shown, raws = [], []
    for match in REFERENCE.finditer(raw):
        plain = html.unescape(match[0]) if match[0][0] == "&" else match[0]
        shown.append(plain)
        raws += match[0] if match[0][0] != "&" else [match[0], *[""] * (len(plain) - 1)] if plain else []
    return Text("".join(shown), raws)


class Cutter:
    def __init__(self, data, languages):
        self.data, self.languages, self.parts, self.items = data, languages, [], []

    def flush(self):
        if self.items:
            self.parts += cut(self.items, body_text)
            self.items = []

    def text(self, begin, end):
        if begin < end:
            self.items.append(text_of(self.data[begin:end]))

    def block(self, tag, end):
        self.flush()
        self.parts += attribute_parts(self.data, tag, self.languages) or [self.data[tag.begin : tag.end]]
        if tag.name == "title" and not tag.closes:  # text without tags
            close = end_tag(self.data, end, "title")
            self.text(end, close)
            self.flush()
            return close
        self.parts.append(self.data[tag.end : end])
        return end

    def markup(self, at):
        """The tag at `at`; gives where the next token begins."""
        data, tag = self.data, Markup(self.data, at)
        end, name = tag.end, tag.name
        if not name:
            if data.startswith("<!--", at):  # it goes with its sentence
                self.items.append(Tag(data[at:end]))
            else:
                self.flush()
                self.parts.append(data[at:end])
            return end
        if not tag.closes and not tag.empty and (tag.kept or name in SKIPPED or name in WHOLE):
            end = end_of_kept(data, end, name)
            if name in WHOLE or name in INLINE:
                self.items.append(Tag(data[at:end], "word"))
                return end
            return self.block(tag, end)
        if name in INLINE or name in EMPTY or name in WHOLE:
            kind = "single" if name in EMPTY or tag.empty else "close" if tag.closes else "open"
            parts = attribute_parts(data, tag, self.languages)
            self.items.append(Tag(data[at:end], kind, parts, name, name in ("a", "label")))
            return end
        return self.block(tag, len(data) if name == "plaintext" else end)

    def cut(self):
        at = 0
        while at < len(self.data):
            found = MARKUP.search(self.data, at)
            end = found.start() if found else len(self.data)
            self.text(at, end)
            at = self.markup(end) if found else end
        self.flush()
        return self.parts


def parts(data, source=None, target=None):
    """source, target: languages; where <html> says lang=source, it says target."""
    return Cutter(data, (source, target) if source and target else None).cut()
