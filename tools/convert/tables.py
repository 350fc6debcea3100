"""Read a table that the converters in C and Python share, such as marian.inc.

    rows = tables.read("marian.inc")    # {macro: [values of a row]}; identifiers become texts
"""
import ast
import os
import re


def value_of(node):
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def read(name):
    rows = {}
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name), encoding="utf-8") as file:
        for line in file:
            if re.match("[A-Z]", line):
                row = ast.parse(line.strip(), mode="eval").body
                rows.setdefault(row.func.id, []).append([value_of(x) for x in row.args])
    return rows
