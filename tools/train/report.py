#!/usr/bin/env python3
"""Write measurements into model cards, as tables and SVG plots; as a program, plot
curve.csv of training runs.

    tools/train/report.py RUN -o curve.svg                     # all losses
    tools/train/report.py RUN OTHER -y dev_loss,bleu.en-de -x step -o curve.svg
"""
import argparse
import csv
import html
import math
import pathlib
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


COLOURS = "#555555", "#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#17becf"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 60, 20, 20, 50


def ticks(values):
    """Return a round step, and the multiples of it that enclose the values."""
    low, high = min(values), max(values)
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-6)))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 8)
    return step, range(math.floor(low / step), math.floor(high / step) + 2)


def plot(series, x_title, y_title, linear=False):
    """Return an SVG plot of `series`: name -> list of (x, values of y). The x axis is logarithmic or linear; lines join
    means."""
    every = [(x, y) for points in series.values() for x, values in points for y in values]
    xs = sorted({x for x, _ in every})
    step, rows = ticks([y for _, y in every])
    across_step, columns = ticks(xs)
    first, last = (columns[0] * across_step, columns[-1] * across_step) if linear else (
        math.log2(xs[0]), math.log2(xs[0]) + max(math.log2(xs[-1] / xs[0]), 1))

    def across(x):
        return LEFT + 20 + (WIDTH - LEFT - RIGHT - 40) * ((x if linear else math.log2(x)) - first) / (last - first)

    def down(y):
        return TOP + (HEIGHT - TOP - BOTTOM) * (rows[-1] - y / step) / (rows[-1] - rows[0])

    def text(x, y, words, anchor="middle", more=""):
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{html.escape(words)}</text>'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
           'font-size="13">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for i in rows:
        y = down(i * step)
        out += [f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>',
                text(LEFT - 8, y + 4, f"{i * step:.6g}", "end")]
    marks = [(i * across_step, f"{i * across_step:.6g}") for i in columns] if linear else [(x, f"{x:,}") for x in xs]
    out += [text(across(x), HEIGHT - BOTTOM + 20, words) for x, words in marks]
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


def number(text, name, path, line):
    try:
        return float(text)
    except (TypeError, ValueError):
        raise ValueError(f"{path}: line {line}: {name} is {text!r}, not a number") from None


def curve(path, x_name, y_names):
    """Return {column: list of (x, [y])} of a curve.csv. y_names: None selects all losses and perplexity. Where x falls,
    another run begins at 0: add the previous x."""
    if path.is_dir():
        path /= "curve.csv"
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        known, rows = reader.fieldnames or [], list(reader)
    names = y_names or [x for x in known if "loss" in x] + [x for x in known if x == "ppl"][:1]
    missing = [name for name in [x_name, *names] if name not in known]
    if missing or not names:
        sys.exit(f"report.py: {path}: " + (f"no column {missing[0]}; available: {', '.join(known)}" if rows else "no rows"))
    found, start, before = {name: [] for name in names}, 0.0, 0.0
    for line, row in enumerate(rows, 2):
        x = number(row[x_name], x_name, path, line)
        start, before = start + (before if x < before else 0), x
        for name in names:
            y = number(row[name], name, path, line) if row[name] else math.nan
            if math.isfinite(y):  # the loss of a run that diverged is not
                found[name].append((start + x, [y]))
    return {name: points for name, points in found.items() if points}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="folder of a run, or its curve.csv")
    parser.add_argument("-o", "--output", required=True, type=pathlib.Path, metavar="FILE", help="SVG file to write")
    parser.add_argument("-x", default="minutes", metavar="COLUMN", help="default: %(default)s")
    parser.add_argument("-y", metavar="LIST", help="comma-separated columns (default: all losses and perplexity)")
    o = parser.parse_args()
    names = o.y.split(",") if o.y else None
    try:
        several = {str(run): curve(run, o.x, names) for run in o.runs}
        series = {name if len(several) == 1 else f"{run}: {name}": points
                  for run, found in several.items() for name, points in found.items()}
        columns = dict.fromkeys(name for found in several.values() for name in found)
        o.output.write_text(plot(series, o.x, ", ".join(columns), linear=True), encoding="utf-8")
    except OSError as error:
        sys.exit(f"report.py: {error.filename}: {error.strerror}")
    except ValueError as error:
        sys.exit(f"report.py: {error}")


if __name__ == "__main__":
    main()
