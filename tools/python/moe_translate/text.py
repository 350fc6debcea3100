"""A text with its context."""


class Text(str):
    """A text, and `before`: the lines that precede it. Prompted models are shown the last lines, up to the option
    context, default 16; other models reject such a text."""

    before: str

    def __new__(cls, text: str, before: str = "") -> "Text":
        made = super().__new__(cls, text)
        made.before = before
        return made

    def __getnewargs__(self) -> tuple[str, str]:
        return str(self), self.before
