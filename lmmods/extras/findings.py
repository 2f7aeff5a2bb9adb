"""What `verify` and `doctor` find: printed as they go, a few lines each, and counted."""

import textwrap
from dataclasses import dataclass, field
from typing import Literal

from lmmods.core.console import say

INDENT = 9  # columns before a text


@dataclass
class Findings:
    """Lines of a command; `problems` are the texts of those that are one."""

    width: int = 120
    problems: list[str] = field(default_factory=list)

    def add(self, kind: Literal["ok", "note", "problem"], text: str, remedy: str = "") -> None:
        """Print a finding, and below it what to do."""
        if kind == "problem":
            self.problems.append(text)
        for begin, part in ((f"{kind:<{INDENT}}", text), (" " * INDENT + "-> ", remedy)):
            if part:
                say(textwrap.fill(part, self.width, initial_indent=begin, subsequent_indent=" " * len(begin),
                                  break_long_words=False, break_on_hyphens=False))
