"""Markdown (CommonMark with tables and strikethrough): markdown-it-py finds the blocks, their text is translated, code,
addresses, front matter and every sign of structure stay. A paragraph that was wrapped comes out as one line."""

import re

from markdown_it import MarkdownIt

from .segments import Mark, Segment

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
FRONT_MATTER = re.compile(r"\A---\n.*?\n(?:---|\.\.\.)\n", re.S)
CELL = re.compile(r" *\|")
BLOCK_SIGN = re.compile(r"^(#{1,6}(?= |$)|>|[-+*](?= |$)|\d{1,9}[.)](?= |$)|={1,}$|-{3,}$|~~~|```|\|)")
INLINE = re.compile(
    r"""
    (?P<code>(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`))
  | (?P<escape>\\[!-/:-@\[-`{-~])
  | (?P<entity>&(?:\#\d+|\#x[0-9a-fA-F]+|\w+);)
  | (?P<auto><[a-zA-Z][a-zA-Z0-9+.-]*:[^\s<>]*>|<[^\s<>@]+@[^\s<>]+>)
  | (?P<tag><(?P<end>/?)[a-zA-Z][^<>]*?(?P<self>/?)>|<!--.*?-->)
  | (?P<image>!?)\[(?P<text>(?:[^\[\]\\]|\\.|\[[^\[\]]*\])*)\](?P<dest>\((?:[^()\\]|\\.|\([^()]*\))*\)|\[[^\[\]]*\])
  | (?P<sign>\*\*|__|~~|\*|_)(?=\S)(?P<inner>(?:(?!(?P=sign)).|\\.)+?)(?<=\S)(?P=sign)(?!\w)
""",
    re.X | re.S,
)


def items(text):
    """Texts and marks of the inline Markdown `text`."""
    found, end = [], 0
    for match in INLINE.finditer(text):
        sign = match["sign"]
        if sign and (match.start() and (text[match.start() - 1].isalnum() or text[match.start() - 1] == sign[0])):
            continue  # inside a word
        found.append(text[end : match.start()])
        end = match.end()
        if match["dest"]:
            found += [Mark(match["image"] + "[", "open"), *items(match["text"]), Mark("]" + match["dest"], "close")]
        elif sign:
            found += [Mark(sign, "open"), *items(match["inner"]), Mark(sign, "close")]
        elif match["tag"] and not match["tag"].startswith("<!--") and not match["self"]:
            found.append(Mark(match[0], "close" if match["end"] else "open"))
        else:
            found.append(Mark(match[0]))
    return [item for item in (*found, text[end:]) if item != ""]


def shape(text):
    """What inline Markdown consists of, its texts left out."""

    def walk(tokens):
        for token in tokens:
            if token.type not in ("text", "softbreak", "text_special"):
                yield token.type, token.markup, token.attrs.get("href") or token.attrs.get("src")
            if token.type == "image":
                yield from walk(token.children)

    return sorted(map(str, walk(PARSER.parseInline(text)[0].children)))


def segment(text, cell):
    wanted = shape(text)

    def escape(plain):
        return plain.replace("|", r"\|") if cell and "|" in plain and r"\|" not in plain else plain

    def check(raw):
        return (
            "\n" not in raw
            and shape(raw) == wanted
            and bool(BLOCK_SIGN.match(raw)) == bool(BLOCK_SIGN.match(text))
            and (len(raw) - len(raw.rstrip("\\"))) % 2 == 0
        )

    return Segment(items(text), escape, check)


def block_parts(data, spots):
    """A block whose lines of text lie at `spots`: joined, but for hard breaks, behind which signs of lists and quotes
    come again."""
    found, text = [], ""
    cell = len(spots) == 1 and bool(CELL.match(data, spots[0][1]))
    for at, (begin, end) in enumerate(spots):
        line, between = data[begin:end], data[end : spots[at + 1][0]] if at + 1 < len(spots) else ""
        hard = between and (line.endswith("\\") or between.startswith("  "))
        if hard and line.endswith("\\"):
            line, between = line[:-1], "\\" + between
        text += (" " if text else "") + line
        if hard or not between:
            found += [segment(text, cell), between]
            text = ""
    return found


def parts(data):
    front = FRONT_MATTER.match(data)
    begin = front.end() if front else 0
    starts = [begin] + [begin + match.end() for match in re.finditer("\n", data[begin:])] + [len(data)]
    found, position = [], 0
    for token in PARSER.parse(data[begin:]):
        if token.type != "inline" or not token.map or not token.content.strip():
            continue
        spots = []
        for line, content in enumerate(token.content.split("\n"), token.map[0]):
            # Each line of the content is the end of a source line, behind signs of lists and quotes.
            low = max(spots[-1][1] if spots else position, starts[line])
            at = data.find(content.strip(), low, starts[line + 1])
            if at < 0:
                break
            spots.append((at, at + len(content.strip())))
        else:
            found += [data[position : spots[0][0]], *block_parts(data, spots)]
            position = spots[-1][1]
    return [*found, data[position:]]
