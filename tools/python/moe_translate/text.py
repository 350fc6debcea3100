"""A text with its context, and pairs of texts."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any


class Text(str):
    """A text, and `before`, the preceding lines. Prompted models see the last N of these lines, where N is the option
    context (default: 16); other models reject a text with preceding lines."""

    before: str

    def __new__(cls, text: str, before: str = "") -> "Text":
        if not isinstance(before, str):
            raise TypeError(f"before must be a str, not {type(before).__name__}")
        made = super().__new__(cls, text)
        made.before = before
        return made

    def __getnewargs__(self) -> tuple[str, str]:
        return str(self), self.before


def paired(left: Iterable[Any], right: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """zip(strict=True), which Python 3.9 does not have."""
    end = object()
    for pair in itertools.zip_longest(left, right, fillvalue=end):
        if pair[0] is end or pair[1] is end:
            raise ValueError("different numbers of texts")
        yield pair
