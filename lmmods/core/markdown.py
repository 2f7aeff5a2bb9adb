"""Texts of anybody in Markdown, where nothing in them is markup: no HTML, no link, no end of their block."""

import re

# All that some reader of Markdown takes for the end of a line; what follows it would begin a block of its own.
_LINE_END = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+.!|~&-])")


def fenced(text: str, language: str = "") -> str:
    """A block of code, between fences longer than any run of backticks in it (CommonMark 0.31, section 4.5)."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n" + "\n".join(_LINE_END.split(text)) + f"\n{fence}"


def indented(text: str) -> str:
    """A block of code for readers that know no fences, such as TensorBoard's: each line is indented."""
    return "\n".join(f"    {line}" for line in _LINE_END.split(text))


def code(text: str) -> str:
    """Code within a line, between more backticks than any run of them in it (section 6.1)."""
    ticks, text = "`" * (_longest_run(text) + 1), " ".join(_LINE_END.split(text))
    return f"{ticks} {text} {ticks}" if "`" in text else f"{ticks}{text}{ticks}"


def escaped(text: str) -> str:
    """Words within a line: whatever Markdown or HTML would read in them is a character (section 2.4)."""
    plain = " ".join(_LINE_END.split(text))
    return _MARKUP.sub(r"\\\1", plain) if re.search(r"[\\`*{}\[\]<>()#!|~&]", plain) else plain


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
