"""Markdown: CommonMark with tables, strikethrough and common extensions (front matter, alerts, footnotes, task lists,
definition lists, heading ids, formulas, shortcodes). markdown-it-py finds the blocks, whose text is translated, as are
titles of links; HTML blocks are translated as pages. Code, addresses and markup do not change. A wrapped paragraph
becomes one line."""

import re
from bisect import bisect_right

from markdown_it import MarkdownIt
from markdown_it.common.utils import normalizeReference

from . import pages
from .inline import cut
from .lines import Line
from .segments import Mark, Place, Segment

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
FRONT_MATTER = re.compile(r"\A(?:---\r?\n.*?\n(?:---|\.\.\.)|\+\+\+\r?\n.*?\n\+\+\+)[ \t]*(?:\r?\n|\Z)", re.S)
ALERT = re.compile(r"\[!\w+\][ \t]*$")
# Fences of containers (Docusaurus, Pandoc) and admonitions (MkDocs): ::: note, !!! warning "A title"
CONTAINER = re.compile(r"(?::{3,}|[!?]{3}\+?|={3})(?:[ \t]*[\w{\[.#|-][^\"\r\n]*)?(?:\"([^\"\r\n]*)\"[ \t]*)?$")
INDENTED = re.compile(r"^(?:[!?]{3}\+? ?\w|={3} ?\").*\n(?:(?:    .*|[ \t\r]*)\n?)+", re.M)
NOTE = re.compile(r"^([ \t>*+-]*\[\^[^\[\]\s]+\]):", re.M)
# A footnote and its indented paragraphs, without the first one
NOTES = re.compile(r"^(\[\^[^\[\]\s]+\]\..*\n(?:[ \t]*\S.*\n)*)((?:(?:    .*|[ \t\r]*)\n?)+)", re.M)
DEFINITION = re.compile(r":[ \t]+|\[\^[^\[\]\s]+\]:[ \t]*")
FORMULA = re.compile(r"^[ \t>]*\$\$(?:(?!\n[ \t>]*\n)[^$])*\$\$[ \t]*$", re.M)
PAGE = re.compile(r"[\f\v\x1c-\x1f\x85\u2028\u2029]")  # breaks that the parser treats as spaces
BLOCK_SIGN = re.compile(r"^(#{1,6}(?= |$)|>|[-+*](?= |$)|\d{1,9}[.)](?= |$)|={1,}$|-{3,}$|~~~|```|\|)")
# Constructs with a closing mark have a maximum length, because each opening mark starts a search for the closing mark.
INLINE = re.compile(
    r"""
    (?P<word>(?<!`)(?P<ticks>`{1,100})(?!`).{1,1000}?(?<!`)(?P=ticks)(?!`)
      | <[a-zA-Z][a-zA-Z0-9+.-]*:[^\s<>]*> | <[^\s<>@]+@[^\s<>]+>
      | <(?P<whole>code|kbd|samp|var|math|svg)\b[^<>]*>.{0,3000}?</(?P=whole)>
      | \$\$[^$]+\$\$ | (?<![\w$\\])\$(?![\s$])[^$]*?(?<![\s\\])\$(?![\w$])
      | \\\(.{1,1000}?\\\) | \{\{.{0,1000}?\}\} | \{%.{0,1000}?%\}
      | (?<![\w:]):[a-z0-9_+-]+:(?![\w:])
      | (?<!\w)\w+(?:\\_\w+)+ )
  | (?P<single>\\[!-/:-@\[-`{-~] | <!--.{0,3000}?-->
      | \[\^[^\[\]\s]+\]:? | ^\[[ xX]\](?=\s) | ^\[!\w+\]
      | \{:?[ ]*[#.][^{}\n]*\} | [\f\v\x1c-\x1f\x85\u2028\u2029] )
  | (?P<tag><(?P<end>/?)(?P<name>[a-zA-Z][\w-]*)
      [^<>"']*?(?:(?:"[^"]{0,1000}"|'[^']{0,1000}')[^<>"']*?){0,20}?(?P<self>/?)>)
  | (?P<image>!?)\[(?P<text>(?:[^\[\]\\]|\\.|\[(?:[^\[\]\\]|\\.)*\])*)\]
    (?P<dest>\((?:[^()\\]|\\.|\([^()]*\))*\)|\[[^\[\]]*\])?
  | (?P<sign>\*\*|__|~~|\*|_)(?=\S)(?P<inner>(?:\\.|(?!(?P=sign)).)+?)(?<=\S)(?P=sign)(?!\w)
""",
    re.X | re.S,
)
TITLE = r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\((?:[^()\\]|\\.)*\))"""
TITLED = re.compile(rf"(\(\s*(?:<[^<>]*>|[^\s<]\S*)\s+)({TITLE})(\s*\))", re.S)
REFERENCE = re.compile(rf"\s({TITLE})\s*\Z", re.S)
# Attributes that readers see
SPOKEN = re.compile(r"\s(?:alt|title|aria-label|placeholder)\s*=\s*(?:\"[^\"]*\"|'[^']*')", re.I)
VOID = set("br hr img input wbr".split())


def title_parts(title):
    """Return the parts of a link's title, which is not Markdown, and its quotes."""
    sign, text, end = title[0], title[1:-1], title[-1]

    def signs(raw):
        return sorted(re.findall(r"\\?[|\[\]]", raw))

    def check(raw):
        return bool(re.fullmatch(TITLE, sign + raw + end, re.S)) and signs(raw) == signs(text) and "\n\n" not in raw

    def escape(plain):
        return re.sub(f"[{re.escape(sign + end)}]", r"\\\g<0>", plain)

    plain = re.sub(rf"\\([{re.escape(sign + end)}])", r"\1", text)
    line = Line([plain], escape, raw=text)
    line.check = check
    return [sign, line, end]


def link_items(match, references):
    """Return the items of a link, marks and text, or None if the reference is undefined."""
    dest = match["dest"]
    if dest in (None, "[]"):
        if normalizeReference(match["text"]) not in references:
            return None
        dest = f"[{match['text']}]"
    elif dest[0] == "[" and normalizeReference(dest[1:-1]) not in references:
        return None
    opened = Mark(match["image"] + "[", "open", link=True)
    titled = TITLED.fullmatch(dest)
    parts = ["]" + titled[1], *title_parts(titled[2]), titled[3]] if titled else []
    return [opened, *items(match["text"], references), Mark("]" + dest, "close", parts)]


def items(text, references):
    """Return the texts and marks of the inline Markdown `text`."""
    found, end, at = [], 0, 0
    while match := INLINE.search(text, at):
        at, sign = match.end(), match["sign"]
        if sign and (match.start() and (text[match.start() - 1].isalnum() or text[match.start() - 1] == sign[0])):
            at = match.start() + 1  # inside a word, the mark is text
            continue
        if match["text"] is not None:
            more = link_items(match, references)
            if more is None:
                at = match.start() + len(match["image"]) + 1
                continue
        elif sign:
            more = [Mark(sign, "open"), *items(match["inner"], references), Mark(sign, "close")]
        elif match["tag"]:
            name = match["name"].lower()
            kind = "single" if match["self"] or name in VOID else "close" if match["end"] else "open"
            parts = pages.parts(match[0]) if SPOKEN.search(match[0]) else []
            more = [Mark(match[0], kind, parts if len(parts) > 1 else [], name=name, link=name == "a")]
        else:
            more = [Mark(match[0], "word" if match["word"] else "single")]
        found += [text[end : match.start()], *more]
        end = match.end()
    return [item for item in (*found, text[end:]) if item != ""]


def shape(text, references):
    """Return the structure of inline Markdown without the texts."""

    def walk(tokens):
        for token in tokens or ():
            if token.type not in ("text", "softbreak", "text_special"):
                content = SPOKEN.sub(" ", token.content) if token.type in ("code_inline", "html_inline") else ""
                yield token.type, token.markup, token.attrs.get("href") or token.attrs.get("src"), content
            if token.type == "image":
                yield from walk(token.children)

    return sorted(map(str, walk(PARSER.parseInline(text, {"references": references})[0].children)))


def brackets(text):
    return re.sub(r"[^\[\]]", "", re.sub(r"\\.|`[^`]*`", "", text))


def segments(text, cell, references):
    """Return the parts of a line of Markdown."""

    def escape(plain):
        return plain.replace("|", r"\|") if cell and "|" in plain and r"\|" not in plain else plain

    def check_of(original):
        wanted = shape(original, references)

        def check(raw):
            return (
                "\n" not in raw
                and shape(raw, references) == wanted
                and sorted(brackets(raw)) == sorted(brackets(original))
                and bool(BLOCK_SIGN.match(raw)) == bool(BLOCK_SIGN.match(original))
                and (len(raw) - len(raw.rstrip("\\"))) % 2 == 0
            )

        return check

    found = cut(items(text, references), escape)
    for part in found:
        if type(part) is Segment:  # not a title or an attribute
            part.check = check_of(part.original())
    return found


def block_parts(data, spots, cell, references, number):
    """Return the parts of a block whose lines are at `spots`. Lines are joined except at hard breaks, after which list
    and quote markers are repeated. cell: a cell of a table; number(): line number of an offset."""
    found, text = [], ""
    for at, (begin, end) in enumerate(spots):
        last = at + 1 == len(spots)
        line, between = data[begin:end], "" if last else data[end : spots[at + 1][0]]
        if not text:
            found.append(Place(number(begin)))
        if at and not text and (sign := DEFINITION.match(line)):
            found.append(sign[0])
            line = line[sign.end() :]
        if fence := CONTAINER.fullmatch(line):
            found += segments(text, cell, references) if text else []
            low, high = fence.span(1) if fence[1] else (len(line), len(line))
            found += [line[:low], *segments(line[low:high], cell, references), line[high:], between]
            text = ""
            continue
        following = "" if last else data[slice(*spots[at + 1])]
        ends = CONTAINER.fullmatch(following) or DEFINITION.match(following) or not (last or at) and ALERT.match(line)
        hard = line.endswith("\\") or between.startswith("  ")
        broken = not last and (hard or not line or bool(PAGE.search(between)))
        if broken and line.endswith("\\"):
            line, between = line[:-1], "\\" + between
        text += (" " if text else "") + line
        if broken or ends or last:
            found += [*segments(text, cell, references), between]
            text = ""
    return found


def html_block(token, starts, data):
    """Return the bounds of an HTML block and its parts, or None if its lines are not as in the document."""
    lines, spots = [line.lstrip() for line in token.content.removesuffix("\n").split("\n")], []
    for number, line in enumerate(lines, token.map[0]):
        end = starts[number] + len(data[starts[number] : starts[number + 1]].rstrip("\r\n"))
        spots.append((end - len(line), end))
        if data[slice(*spots[-1])] != line:
            return None
    # Markers of lists and quotes precede the lines.
    breaks = [data[end:begin] for (_, end), (begin, _) in zip(spots, spots[1:])]
    return spots[0][0], spots[-1][1], pages.parts("\n".join(lines), breaks=breaks)


def titles(references, starts, data):
    """Yield the bounds and the parts of the titles of link definitions."""
    for reference in references.values():
        begin, end = (starts[line] for line in reference["map"])
        match = REFERENCE.search(data, begin, end) if reference["title"] else None
        if match:
            yield *match.span(1), title_parts(match[1])


def parts(data):
    front = FRONT_MATTER.match(data)
    begin = front.end() if front else 0
    starts = [begin] + [begin + match.end() for match in re.finditer(r"\r\n|\r|\n", data[begin:])] + [len(data)]
    position, known, skipped = 0, {}, data.count("\n", 0, begin)

    def number(at):
        return skipped + bisect_right(starts, at)

    shown = data.replace("\0", "\ufffd")  # as the parser does
    # The indented text of an admonition is not code.
    shown = INDENTED.sub(lambda match: re.sub("^    ", ">   ", match[0], flags=re.M), shown)
    shown = NOTE.sub(r"\1.", shown)  # not the definition of a link
    shown = NOTES.sub(lambda match: match[1] + re.sub("^    ", ">   ", match[2], flags=re.M), shown)
    tokens = PARSER.parse(shown[begin:], known)
    references = known.get("references", {})
    code = {line for token in tokens if token.type in ("fence", "code_block") for line in range(*token.map)}
    formulas = [match.span() for match in FORMULA.finditer(data)]
    formulas = [span for span in formulas if bisect_right(starts, span[0]) - 1 not in code]
    found = list(titles(references, starts, data))
    for before, token in zip([None, *tokens], tokens):
        if token.type == "html_block" and (block := html_block(token, starts, data)):
            found.append(block)
            position = block[1]
        if token.type != "inline" or not token.map or not token.content.strip():
            continue
        spots, (first, last) = [], token.map
        cell = before is not None and before.type in ("td_open", "th_open")
        while first + 1 < last and not shown[starts[first] : starts[first + 1]].strip():
            first += 1  # skip lines of form feeds, which the parser strips
        for line, content in enumerate(token.content.split("\n"), first):
            # Each line of the content is the end of a source line, which may begin with list and quote markers.
            low = max(spots[-1][1] if spots else position, starts[line])
            content, rest = content.strip(), shown[low : starts[line + 1]]
            content = content.replace("|", r"\|") if cell else content
            at = low + (rest.find(content) if content else len(rest.rstrip("\r\n")))
            if at < low:
                break
            spots.append((at, at + len(content)))
        else:
            near = bisect_right(formulas, (spots[0][0], len(data))) - 1
            if near >= 0 and spots[0][0] < formulas[near][1]:
                continue
            position = spots[-1][1]
            found.append((spots[0][0], position, block_parts(data, spots, cell, references, number)))
    written, position = [], 0
    for begin, end, inside in sorted(found, key=lambda block: block[0]):
        written += [data[position:begin], Place(number(begin)), *inside]
        position = end
    return [*written, data[position:]]
