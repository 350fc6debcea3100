#!/usr/bin/env python3
"""The pictures of README.md are there, small, and the plot is that of the table. Prints `ok NAME` or `FAIL NAME`."""
import os
import re
import sys

import pictures
from suite import Suite

test = Suite()


def pictures_of_readme():
    with open(os.path.join(pictures.ROOT, "README.md"), encoding="utf-8") as file:
        return [os.path.join(pictures.ROOT, x) for x in re.findall(r"!\[[^]]*\]\(([^)]*)\)", file.read())]


@test
def pictures_are_there_and_small():
    paths = pictures_of_readme()
    assert len(paths) == 3
    for path in paths:
        assert os.path.getsize(path) < 100_000, path


@test
def the_plot_shows_the_numbers_of_the_table():
    (path,) = [x for x in pictures_of_readme() if x.endswith(".svg")]
    with open(path, encoding="utf-8") as file:
        plot = file.read()
    assert plot == pictures.drawn()
    assert len(pictures.speeds()[0]) == 8 and "<rect" in plot


@test
def the_version_beside_the_pictures_is_this_one():
    with open(os.path.join(pictures.ROOT, "moe.h"), encoding="utf-8") as file:
        version = re.search(r'MOE_VERSION "(.*)"', file.read())[1]
    with open(os.path.join(pictures.ROOT, "README.md"), encoding="utf-8") as file:
        assert re.findall(r"The page of `moe-\w+` \((.*?)\)", file.read()) == [version] * 2


if __name__ == "__main__":
    sys.exit(test.run())
