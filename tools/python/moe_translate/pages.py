"""HTML: libmoetext splits a page into segments and inserts their translations (moetext.h)."""

import ctypes
from itertools import islice

from . import library as c
from .engine import checked_call, lib
from .languages import two_letters
from .segments import Mark, Segment, translate_all


class Page:
    """A library page object. In its output, a number between two bytes 0xff represents the segment with that number."""

    def __init__(self, text, source, target):
        self.text, self.handle = text.encode("utf-8", "surrogatepass"), ctypes.c_void_p()
        languages = [code and two_letters(code).replace("_", "-").encode() for code in (source, target)]
        self.options = c.HtmlOptions(c.TAGS_MARKED, 0, *languages)
        checked_call("moetext_html_new", self.text, len(self.text), self.options, self.handle)

    def __del__(self):
        lib().moetext_html_free(self.handle)

    def call(self, name, *arguments):
        """Call a function that returns bytes or NULL."""
        length = ctypes.c_size_t()
        data = getattr(lib(), "moetext_html_" + name)(self.handle, *arguments, length)
        return ctypes.string_at(data, length.value) if data else None


def texts_of(data):
    """Return the texts in the library's output, and the numbers of the segments between them."""
    found = [part.decode("utf-8", "surrogatepass") for part in data.split(b"\xff")]
    found[1::2] = map(int, found[1::2])
    return found


def broken(text, breaks):
    """Write the line breaks of a text as `breaks`, or all as the first one if their number differs."""
    lines = text.split("\n")
    if len(breaks) != len(lines) - 1:
        breaks = (breaks[:1] or ["\n"]) * (len(lines) - 1)
    return "".join(map("".join, zip(lines, [*breaks, ""])))


class PageSegment(Segment):
    """A sentence or an attribute. Attributes of tags inside a sentence are parts of the tags' marks."""

    def __init__(self, page, number):
        self.page, self.number, self.items, self._before, self._after = page, number, [], [], []
        inside, self.breaks = texts_of(self._placed("place_pieces", ""))[1::2], []
        self.inner = {inner: Mark("", "single", [PageSegment(page, inner)]) for inner in inside}

    def _placed(self, name, text, *links):
        data = text.encode("utf-8", "surrogatepass")
        return self.page.call(name, self.number, data, len(data), *links)

    def _text(self, placed):
        if placed is None:
            return None
        return broken("".join(p if isinstance(p, str) else self.inner[p].raw for p in texts_of(placed)), self.breaks)

    def source(self):
        return self.page.call("source", self.number).decode("utf-8", "surrogatepass")

    def accept(self, translation):
        return self._text(self._placed("place", translation, None, 0))

    def marks(self):
        return list(self.inner.values())

    def pieces(self):
        return self.page.call("pieces", self.number).decode("utf-8", "surrogatepass").split("\n")

    def accept_pieces(self, translations):
        return self._text(self._placed("place_pieces", "\n".join(" ".join(text.split("\n")) for text in translations)))

    def original(self):
        return self.accept_pieces([])


def parts(data, source=None, target=None, breaks=None):
    """Return the parts of a page. Its language, `source` or the language of <html>, becomes `target` in lang.
    breaks: how the document writes the line breaks of `data`, e.g. with the markers of a quote."""
    page = Page(data, source, target)
    found = texts_of(page.call("write", None, None))
    found = [part if isinstance(part, str) else PageSegment(page, part) for part in found]
    rest = iter(breaks or ())
    for at, part in enumerate(found) if breaks else ():
        text = part if isinstance(part, str) else part.original()
        mine = list(islice(rest, text.count("\n")))
        if isinstance(part, str):
            found[at] = broken(text, mine)
        else:
            part.breaks = mine
    return found


def translate_pages(pages, translate, source=None, target=None, kept=None):
    """Translate pages as in translate_all(); kept(segment, number of its page)."""
    documents = [parts(page, source, target) for page in pages]
    numbers = {part.page: at for at, found in enumerate(documents) for part in found if isinstance(part, Segment)}
    return translate_all(documents, translate, kept and (lambda segment, _: kept(segment, numbers[segment.page])))
