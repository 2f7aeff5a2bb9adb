"""Untrusted text in Markdown, in which nothing is read as markup: no HTML, no link, no end of its block."""

import re

# All characters that some Markdown reader treats as a line end, after which a new block could start.
_LINE_END = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+.!|~&-])")


def fence(text: str, language: str = "") -> str:
    """Return a code block with fences longer than any run of backticks in it (CommonMark 0.31, section 4.5)."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n" + "\n".join(_LINE_END.split(text)) + f"\n{ticks}"


def indent(text: str) -> str:
    """Return a code block by indentation, for readers without support for fences, such as TensorBoard's."""
    return "\n".join(f"    {line}" for line in _LINE_END.split(text))


def code(text: str) -> str:
    """Return inline code, between more backticks than any run of them in it (section 6.1)."""
    ticks, text = "`" * (_longest_run(text) + 1), " ".join(_LINE_END.split(text))
    return f"{ticks} {text} {ticks}" if "`" in text else f"{ticks}{text}{ticks}"


def escape(text: str) -> str:
    """Return inline text with all characters escaped that Markdown or HTML would interpret (section 2.4)."""
    plain = " ".join(_LINE_END.split(text))
    return _MARKUP.sub(r"\\\1", plain) if re.search(r"[\\`*{}\[\]<>()#!|~&]", plain) else plain


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
