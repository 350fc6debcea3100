#!/usr/bin/env python3
"""Test the pictures: they must be small, and the plot must match the table. Prints `ok NAME` or `FAIL NAME`."""
import os
import re
import sys

import pictures
from suite import Suite

test = Suite()


def pages():
    for folder in "", "tools/programs":
        path = os.path.join(pictures.ROOT, folder)
        with open(os.path.join(path, "README.md"), encoding="utf-8") as file:
            yield path, file.read()


def shown_pictures():
    return [os.path.join(path, x) for path, text in pages() for x in re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)]


@test
def pictures_exist_and_are_small():
    paths = shown_pictures()
    assert len(paths) == 3
    for path in paths:
        assert os.path.getsize(path) < 100_000, path


@test
def the_plot_shows_the_numbers_of_the_table():
    (path,) = [x for x in shown_pictures() if x.endswith(".svg")]
    with open(path, encoding="utf-8") as file:
        plot = file.read()
    assert plot == pictures.drawn()
    assert len(pictures.speeds()[0]) == 8 and "<rect" in plot


@test
def captions_name_the_current_version():
    with open(os.path.join(pictures.ROOT, "moe.h"), encoding="utf-8") as file:
        version = re.search(r'MOE_VERSION "(.*)"', file.read())[1]
    text = "".join(x for _, x in pages())
    assert re.findall(r"The page of `moe-\w+` \((.*?)\)", text) == [version] * 2


if __name__ == "__main__":
    sys.exit(test.run())
