"""Read a table that the converters in C and Python share, such as marian.inc.

    rows = tables.read("marian.inc")    # {macro: [values of a row]}; identifiers become texts
"""
import ast
import json
import os
import re


def value_of(node):
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def read(name):
    rows = {}
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name), encoding="utf-8") as file:
        text = re.sub(r" /\*.*\*/\n", "\n", file.read())
    for row in re.findall(r"^[A-Z].*(?:\n +.*)*", text, re.M):
        row = ast.parse(row, mode="eval").body
        rows.setdefault(row.func.id, []).append([value_of(x) for x in row.args])
    return rows


def words(rows, where):
    """Return the words of the rows (where, words)."""
    return {word for row in rows if row[0] == where for word in row[1].split()}


def choices(rows):
    """Return {key: tuple of values} of rows (..., key, JSON list); an empty list of values is None."""
    return {row[-2]: tuple(json.loads(row[-1])) if row[-1] else None for row in rows}
