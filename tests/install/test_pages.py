#!/usr/bin/env python3
"""Test the Markdown pages: relative links and anchors must exist, and commands must use valid options.

Usage: tests/python tests/install/test_pages.py
Prints `ok NAME` or `FAIL NAME` per test. Requires only the standard library. BIN is the folder of the programs.
"""
import functools
import glob
import os
import re
import subprocess
import sys

from suite import Suite

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.path.join(ROOT, os.environ.get("BIN", "."))
test = Suite()


def pages():
    return sorted(os.path.relpath(x, ROOT) for folder in ("", "models", "tools/**", "tests/**")
                  for x in glob.glob(os.path.join(ROOT, folder, "*.md"), recursive=True))


def text_of(page):
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        return file.read()


def prose(page):
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.S | re.M)


@functools.lru_cache(None)
def anchors(page):
    """Return GitHub's anchors for the headings of a page: lower case, without punctuation, spaces become hyphens."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in titles}


def broken_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        there = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if not os.path.exists(os.path.join(ROOT, there)) or there.startswith(".."):
            yield f"{page}: {target}: missing file"
        elif anchor and anchor not in anchors(there):
            yield f"{page}: {target}: no such heading"


@functools.lru_cache(None)
def options(program):
    path = os.path.join(BIN, program)
    if not os.path.exists(path):  # `make all` does not build all programs
        return None
    return set(re.findall(r"--[a-z][a-z0-9-]*|(?<![\w-])-[A-Za-z](?![\w-])",
                          subprocess.run([path, "--help"], capture_output=True, text=True, check=True).stdout))


def commands(page):
    """Yield (program, arguments) for each command at the start of a code line; continued lines are joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```|^((?: {4}.*\n)+)", text_of(page), re.S | re.M)
    code = "\n".join(fenced or indented for fenced, indented in blocks)
    for line in code.replace("\\\n", " ").split("\n"):
        for part in re.split(r"[|;]|&&|\s#\s", line):
            found = re.search(r"(?:^|\s)(?:\./)?(moe-(?!make|bench)\w+)(\s.*)?$", part)
            if found:
                yield found[1], re.sub(r"'[^']*'|\"[^\"]*\"", "", found[2] or "")


@test
def links_lead_to_files_and_headings():
    assert sum(1 for page in pages() for _ in re.findall(r"\]\(", prose(page))) > 50
    problems = [x for page in pages() for x in broken_links(page)]
    assert not problems, "; ".join(problems)


@test
def commands_use_options_of_the_programs():
    checked, problems = 0, []
    for page in pages():
        for program, arguments in commands(page):
            known = options(program)
            for option in re.findall(r"(?<=\s)--?[A-Za-z][\w-]*", arguments) if known else []:
                checked += 1
                if option not in known:
                    problems.append(f"{page}: {program} has no {option}")
    assert checked > 100 and not problems, (checked, problems)


@test
def the_first_page_is_short():
    assert text_of("README.md").count("\n") <= 200


if __name__ == "__main__":
    sys.exit(test.run())
