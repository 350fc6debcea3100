#!/usr/bin/env python3
"""HTML in moe-server: visible attributes, code in pages, XML.

Usage: tests/python tests/server/test_html.py      (BIN is the folder of the programs)

Prints `ok NAME` or `FAIL NAME` per test and a closing line `N passed, N failed`.
"""

import random
import re
import sys
from html.parser import HTMLParser

from suite import Suite
from test_server import serving

test = Suite()
PAGE = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE html>
<html lang="en-GB"><head><title>My book</title>
<meta name="description" content="A book about dogs"><meta property="og:title" content='The "big" house'>
<meta name="viewport" content="width=device width"></head>
<body><?php if ($a > 1) { echo "Good morning"; } ?>
<p>We see <img src="d.png" alt="a dog &amp; a cat" title=dog> in the house <?= $a > 1 ? "the dog" : "" ?> today.</p>
<img alt="  The dog " src="x"><input type=submit value="Search now"><input type=text value="Keep this"
 placeholder="Your name"><input type="image" alt="Go home"><input alt="Keep this"><textarea placeholder="Your letter">
Keep this</textarea><svg><text title="Keep this">x</text></svg>
<p><a href="#" title="Read the book">Read <b>more</b></a> and <a href="#" aria-label="Close the window">x</a></p>
<p>Good morning, <a href="#" title="The friend">@<span title="The name">tom</span></a>! How are you?</p>
<div title="{{ the dog }}" data-x="the dog" title="The dog"></div><code title="The dog">x</code>
<p translate=no title="The dog">The dog</p><p class="notranslate" title="The dog">The dog</p>
<button title="">Go</button><a title="42" href="x">Home</a> <!-- title="The dog" --> <img alt='It&#39;s "here"'>
</body></html>
"""


class Tags(HTMLParser):
    """Collect the tags and attributes of a page. They are sorted because tags inside a sentence move with its words."""

    def __init__(self, data):
        super().__init__(convert_charrefs=True)
        self.found = []
        self.feed(data)
        self.close()
        self.found.sort(key=repr)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, attrs))


@test
def attributes_are_translated():
    with serving() as server:

        def translated(text):
            return server.translate(text)[1]["translatedText"]

        got = server.translate(PAGE, format="html")[1]["translatedText"]
        for given, wanted in (
            ('content="A book about dogs"', f'content="{translated("A book about dogs")}"'),
            ('title="Read the book"', f'title="{translated("Read the book")}"'),
            ('aria-label="Close the window"', f'aria-label="{translated("Close the window")}"'),
            ('value="Search now"', f'value="{translated("Search now")}"'),
            ('placeholder="Your name"', f'placeholder="{translated("Your name")}"'),
            ('placeholder="Your letter"', f'placeholder="{translated("Your letter")}"'),
            ('<input type="image" alt="Go home">', f'<input type="image" alt="{translated("Go home")}">'),
            ('<img alt="  The dog " src="x">', f'<img alt="  {translated("The dog")} " src="x">'),
            ('title="The friend"', f'title="{translated("The friend")}"'),
            ('title="The name"', f'title="{translated("The name")}"'),
            ('<html lang="en-GB">', '<html lang="de">'),
            ('<svg><text title="Keep this">', f'<svg><text title="{translated("Keep this")}">'),
        ):
            assert given in PAGE and given not in got and got.count(wanted) == 1, (given, wanted, got)
        for kept in (
            '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE html>\n',
            '<?php if ($a > 1) { echo "Good morning"; } ?>',
            '<?= $a > 1 ? "the dog" : "" ?>',
            '<meta name="viewport" content="width=device width">',
            'value="Keep this"',
            '<input alt="Keep this">',
            "\nKeep this</textarea>",
            "title=dog>",
            '<div title="{{ the dog }}" data-x="the dog" title="The dog"></div><code title="The dog">x</code>',
            '<p translate=no title="The dog">The dog</p><p class="notranslate" title="The dog">The dog</p>',
            '<button title="">',
            '<a title="42" href="x">',
            '<!-- title="The dog" -->',
        ):
            assert PAGE.count(kept) == got.count(kept) == 1, (kept, got)
        before, after = Tags(PAGE).found, Tags(got).found
        assert [tag for tag, _ in before] == [tag for tag, _ in after]


@test
def attributes_are_translated_like_texts():
    """In 60 random pages each tag occurs once, and each attribute is translated like a separate text."""
    words = "the dog|a big house|my friend|Where is my book?|It's \"here\"|5 < 6 & more|Good morning".split("|")
    pages, texts = [], []
    for seed in range(60):
        pick, inside = random.Random(seed), []
        for _ in range(pick.randint(1, 5)):
            text = pick.choice(words)
            written = text.replace("&", "&amp;").replace('"', "&quot;").replace("<", pick.choice(("<", "&lt;")))
            texts.append(text)
            tags = ('<img alt="%s">', '<a title="%s">book</a>', '<b aria-label="%s">new</b>',
                    '</p><div title="%s"></div><p>', '<input placeholder="%s">')  # fmt: skip
            inside.append(pick.choice(tags) % written)
        pages.append("<p>We saw " + pick.choice((" and ", ", ", " ")).join(inside) + " in the evening.</p>")
    with serving() as server:
        translated = dict(zip(words, server.translate(words)[1]["translatedText"], strict=True))
        answers = server.translate(pages, format="html")[1]["translatedText"]
        for page, answer in zip(pages, answers, strict=True):
            wanted = [(tag, [(name, translated[value]) for name, value in attrs]) for tag, attrs in Tags(page).found]
            assert sorted(wanted, key=repr) == Tags(answer).found, (page, answer)


@test
def the_language_of_a_page_is_replaced():
    with serving() as server:
        for given, source, target, wanted in (
            ("<html lang='en'>", "en", "de", "<html lang='de'>"),
            ("<HTML class=a LANG=en-US>", "en", "de_DE", "<HTML class=a LANG=de-DE>"),
            ('<html lang="fr">', "auto", "de", '<html lang="de">'),
            ('<html lang="fr">', "en", "de", '<html lang="fr">'),
            ('<html lang="">', "en", "de", '<html lang="">'),
            ("<html>", "en", "de", "<html>"),
            ('<p lang="en">', "en", "de", '<p lang="de">'),
        ):
            body = {"q": given + "Good morning", "source": source, "target": target, "format": "html"}
            got = server.ask("/translate", body)[1]["translatedText"]
            assert got.startswith(wanted) and "Guten Morgen" in got, (given, got)


@test
def white_space_around_a_picture_is_kept():
    with serving() as server:
        got = server.translate("<p>We see <img src=a> in the house.</p>", format="html")[1]["translatedText"]
        assert re.search(r"\w <img src=a> \w", got), got


@test
def xml_elements_can_have_any_name():
    text = (
        '<doc><par name="The dog">The <i>dog</i> is here.</par><par>Press <x id="1"/> to open the house.</par>'
        '<![CDATA[The dog > here]]><title>A <y>book</y></title><script>Good morning</script><?go on > Good dog ?>'
        '<par translate="no">The <par>dog</par> is here.</par></doc>'
    )
    with serving() as server:
        body = {"text": text, "source_lang": "EN", "target_lang": "DE", "tag_handling": "xml"}
        got = server.ask("/v2/translate", body)[1]["translations"][0]["text"]
        tags = r"<!\[CDATA\[.*?\]\]>|<\?.*?\?>|<[^>]*>"
        assert sorted(re.findall(tags, got)) == sorted(re.findall(tags, text)), got
        assert "<par name=\"The dog\">Der <i>Hund</i> ist hier.</par>" in got, got
        assert '<x id="1"/>' in got.split("<par>")[1].split("</par>")[0], got
        assert "<title>Ein <y>Buch</y></title><script>Guten Morgen</script>" in got, got
        assert '<par translate="no">The <par>dog</par> is here.</par>' in got, got


if __name__ == "__main__":
    sys.exit(test.run())
