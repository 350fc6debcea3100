"""HTML: texts and some attributes are translated, every other byte stays."""

import html
import re
from html.parser import HTMLParser

from .segments import Mark, Segment

INLINE = set(
    "a abbr acronym b bdi bdo big cite data del dfn em font i ins label mark q s small span strike strong sub "
    "sup time tt u".split()
)
EMPTY = set("img wbr input".split())  # inline, without a content of their own
WHOLE = set("code kbd samp var".split())  # inline, content and all not to be translated
SKIPPED = set("script style pre textarea template svg math noscript".split())
VOID = set("area base br col embed hr img input link meta source track wbr".split())
ATTRIBUTES = set("alt title placeholder aria-label".split())
ATTRIBUTE = re.compile(r"""(\s)([a-zA-Z-]+)(\s*=\s*)("([^"]*)"|'([^']*)')""")


class Events(HTMLParser):
    """(offset, kind, name, attributes) of everything in a document; kinds: start, end, empty, text, other."""

    def __init__(self, data):
        super().__init__(convert_charrefs=False)
        self.events, self.lines = [], [0]
        self.lines += [match.end() for match in re.finditer("\n", data)]
        self.feed(data)
        self.close()
        self.add("other")

    def add(self, kind, name="", attributes=()):
        line, column = self.getpos()
        self.events.append((self.lines[line - 1] + column, kind, name, dict(attributes)))

    def handle_starttag(self, tag, attrs):
        self.add("empty" if tag in VOID else "start", tag, attrs)

    def handle_startendtag(self, tag, attrs):
        self.add("empty", tag, attrs)

    def handle_endtag(self, tag):
        self.add("end", tag)

    def handle_data(self, data):
        self.add("text")

    def handle_entityref(self, name):
        self.add("text")

    handle_charref = handle_entityref

    def handle_comment(self, data):
        self.add("other")

    handle_decl = handle_pi = unknown_decl = handle_comment


def kept(name, attributes):
    """Whether the author wants it as it is."""
    classes = (attributes.get("class") or "").split()
    return name in SKIPPED or attributes.get("translate") == "no" or "notranslate" in classes


def attribute_parts(raw, name, attributes):
    """A tag with its attributes that are to be translated as segments of their own."""
    if not any(key in ATTRIBUTES for key in attributes) or kept(name, attributes):
        return [raw]
    parts, end = [], 0
    for match in ATTRIBUTE.finditer(raw):
        group = 5 if match[5] is not None else 6
        if match[2].lower() in ATTRIBUTES and not (name == "input" and match[2].lower() == "alt"):
            parts += [raw[end : match.start(group)], Segment([html.unescape(match[group])], attribute_text)]
            end = match.end(group)
    return parts + [raw[end:]]


def attribute_text(text):
    return html.escape(text, quote=True)


def body_text(text):
    return html.escape(text, quote=False)


class Cutter:
    def __init__(self, data):
        self.data, self.parts, self.items = data, [], []
        self.skip, self.depth = None, 0  # inside an element that is kept: its name and how deep

    def flush(self):
        if self.items:
            self.parts.append(Segment(self.items, body_text))
            self.items = []

    def block(self, raw, name="", attributes=()):
        self.flush()
        self.parts += attribute_parts(raw, name, dict(attributes))

    def inside_kept(self, kind, name, raw):
        if name == self.skip and kind in ("start", "end"):
            self.depth += 1 if kind == "start" else -1
        if isinstance(self.items[-1] if self.items else None, Mark):
            self.items[-1].raw += raw
        else:
            self.parts[-1] += raw

    def cut(self):
        events = Events(self.data).events
        ends = [event[0] for event in events[1:]] + [len(self.data)]
        self.parts.append(self.data[: events[0][0]])
        for (begin, kind, name, attributes), end in zip(events, ends):
            raw = self.data[begin:end]
            if not raw:
                continue
            if self.depth:
                self.inside_kept(kind, name, raw)
            elif kind == "text":
                self.items.append(html.unescape(raw))
            elif kind == "start" and (name in WHOLE or kept(name, attributes)):
                self.skip, self.depth = name, 1
                if name in WHOLE or name in INLINE:
                    self.items.append(Mark(raw))
                else:
                    self.flush()
                    self.parts.append(raw)
            elif name in INLINE and kind in ("start", "end"):
                mark = "open" if kind == "start" else "close"
                self.items.append(Mark(raw, mark, attribute_parts(raw, name, attributes)))
            elif name in EMPTY:
                self.items.append(Mark(raw, "single", attribute_parts(raw, name, attributes)))
            else:
                self.block(raw, name, attributes)
        self.flush()
        return self.parts


def parts(data):
    return Cutter(data).cut()
