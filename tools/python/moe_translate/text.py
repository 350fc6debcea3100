"""A text with what stands before it."""


class Text(str):
    """A text, and `before`: lines that stand before it. A model that is asked in words is shown the last of them, as
    many as the option context says, or 16; with other models such a text fails."""

    before: str

    def __new__(cls, text: str, before: str = "") -> "Text":
        made = super().__new__(cls, text)
        made.before = before
        return made

    def __getnewargs__(self) -> tuple[str, str]:
        return str(self), self.before
