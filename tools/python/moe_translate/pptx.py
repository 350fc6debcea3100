"""Slides (.pptx): paragraphs of slides, notes, tables, diagrams and chart titles, and text that layouts show on
each slide. Fields such as slide numbers and dates are words. Placeholder prompts and comments are not translated."""

import re

from . import ooxml
from .languages import locale_of
from .xmltree import with_attribute


class Part(ooxml.Part):
    prefix = "a:"
    breaks = {"a:br"}
    shown = {"a:t", "m:t"}
    template = "<a:r>{}<a:t>{}</a:t></a:r>"
    noise = re.compile(r"\s(?:lang|altLang|dirty|err|smtClean|bmk)=(?:\"[^\"]*\"|'[^']*')")
    splits = re.compile(r"([\t\n\v\u2028\u2029]|_x000[9BbDd]_)")

    def head(self, properties, begin):
        if not self.right:
            return []
        tag = with_attribute(self.tree.tag(properties) if properties else "<a:pPr/>", "rtl", "1")
        return [(properties.begin, properties.inside, [tag]) if properties else (begin, begin, [tag])]

    def directed(self, form):
        """Name the target language, which spelling checkers use."""
        if not self.target:
            return form
        form = form or "<a:rPr/>"
        return re.sub(r"^<a:rPr", f'<a:rPr lang="{locale_of(self.target)}"', form)


class Layout(Part):
    """A slide layout or slide master, whose placeholders contain only prompts."""

    def is_kept(self, node):
        return node.name == "p:sp" and any(True for _ in node.nodes("p:ph"))


DRAWINGS = dict.fromkeys(".chart .chartshapes .diagramData .diagramDrawing .drawing".split(), Part)
KINDS = dict.fromkeys((".slide", ".notesSlide"), Part) | dict.fromkeys((".slideLayout", ".slideMaster"), Layout)


def unpack(data, target=None):
    return ooxml.unpack(data, KINDS | DRAWINGS, "a presentation", target)
