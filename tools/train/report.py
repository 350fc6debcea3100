"""Write measurements into model cards: tables between two lines of a Markdown file, and plots as SVG."""
import math
import sys


def write_card(path, part, text):
    """Replace the text between the lines `<!-- part -->` and `<!-- end of part -->` of a file."""
    card, begin, end = path.read_text(encoding="utf-8"), f"<!-- {part} -->\n", f"<!-- end of {part} -->"
    if card.count(begin) != 1 or card.count(end) != 1:
        sys.exit(f"{path} must contain the lines {begin.strip()} and {end} exactly once")
    path.write_text(card[:card.index(begin) + len(begin)] + text + card[card.index(end):], encoding="utf-8")


def table(rows):
    """Return the lines of a Markdown table; a row is a dictionary column -> cell."""
    return [f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|", *(f"| {' | '.join(x.values())} |" for x in rows)]


COLOURS = "#555555", "#1f77b4", "#d95f02"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 60, 20, 20, 50


def plot(series, x_title, y_title):
    """Return an SVG plot of `series`: name -> list of (x, values of y). The x axis is logarithmic, lines join means."""
    every = [(x, y) for points in series.values() for x, values in points for y in values]
    xs = sorted({x for x, _ in every})
    low, high = min(y for _, y in every), max(y for _, y in every)
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-6)))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 8)
    first, last = math.floor(low / step), math.floor(high / step) + 1

    def across(x):
        return LEFT + 20 + (WIDTH - LEFT - RIGHT - 40) * math.log2(x / xs[0]) / max(math.log2(xs[-1] / xs[0]), 1)

    def down(y):
        return TOP + (HEIGHT - TOP - BOTTOM) * (last - y / step) / (last - first)

    def text(x, y, words, anchor="middle", more=""):
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{words}</text>'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
           'font-size="13">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for i in range(first, last + 1):
        y = down(i * step)
        out += [f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>',
                text(LEFT - 8, y + 4, f"{i * step:.6g}", "end")]
    out += [text(across(x), HEIGHT - BOTTOM + 20, f"{x:,}") for x in xs]
    out += [text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_title),
            text(0, 0, y_title, more=f' transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"')]
    for i, (name, points) in enumerate(series.items()):
        colour, means = COLOURS[i % len(COLOURS)], [(x, sum(values) / len(values)) for x, values in sorted(points)]
        line = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in means)
        out += [f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>',
                *(f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="4" fill="none" stroke="{colour}" '
                  'stroke-width="1.5"/>' for x, values in points for y in values),
                text(WIDTH - RIGHT - 10, TOP + 18 + 18 * i, name, "end", f' fill="{colour}"')]
    return "\n".join([*out, "</svg>", ""])
