"""A text with its context, and pairs of texts."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any


class Text(str):
    """A text, and `before`, the preceding lines. Prompted models see the last N of these lines, where N is the option
    context (default: 16); other models reject a text with preceding lines. `draft` is a text that the translation may
    resemble, such as the translation of an older version: it saves time and changes no character of the translation."""

    before: str
    draft: str

    def __new__(cls, text: str, before: str = "", draft: str = "") -> "Text":
        for name, value in ("before", before), ("draft", draft):
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a str, not {type(value).__name__}")
        made = super().__new__(cls, text)
        made.before = before
        made.draft = draft
        return made

    def __getnewargs__(self) -> tuple[str, str, str]:
        return str(self), self.before, self.draft


def paired(left: Iterable[Any], right: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """zip(strict=True), which Python 3.9 does not have."""
    end = object()
    for pair in itertools.zip_longest(left, right, fillvalue=end):
        if pair[0] is end or pair[1] is end:
            raise ValueError("different numbers of texts")
        yield pair
