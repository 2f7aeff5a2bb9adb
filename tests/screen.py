"""What a terminal shows of a program: a pseudo-terminal, and the few commands that our output gives one."""

import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path


class Screen:
    """A terminal of `columns`, whose lines stay when they have scrolled away.

    Attributes:
        path: Of the end that a program prints to.
        lines: What is on it; the last is the one with the cursor, or those below.
    """

    def __init__(self, columns: int = 80):
        self._ours, self._theirs = pty.openpty()
        self.path = Path(os.ttyname(self._theirs))
        self.lines, self._row, self._column = [""], 0, 0
        self.resize(columns)
        os.set_blocking(self._ours, False)
        self._rest = ""

    def resize(self, columns: int) -> None:
        """Change the width; what is there is not folded anew. A terminal of 0 does not say its width, which is 80."""
        self._columns = columns or 80
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def open(self):
        """The other end, as a stream of text."""
        return open(os.dup(self._theirs), "w", encoding="utf-8", buffering=1)

    def look(self) -> list[str]:
        """Take up what has been printed by now; returns the lines that are not empty."""
        while True:
            try:
                self._take(os.read(self._ours, 65536).decode())
            except BlockingIOError:
                return [line.rstrip() for line in self.lines if line.strip()]

    def close(self) -> None:
        os.close(self._ours)
        os.close(self._theirs)

    def _take(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\d*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self._rest + text):
            if part == "\r":
                self._column = 0
            elif part == "\n":
                self._row += 1
                self.lines += [""] * (self._row + 1 - len(self.lines))
            elif part in ("\x1b[J", "\x1b[K"):
                self.lines[self._row] = self.lines[self._row][: self._column]
                if part.endswith("J"):
                    del self.lines[self._row + 1:]
            elif part.startswith("\x1b"):
                assert re.fullmatch(r"\x1b\[\d*m", part), f"no command of ours: {part!r}"
            else:
                self._print(part)

    def _print(self, text: str) -> None:
        while text:
            if self._column == self._columns:  # the line is folded
                self._row, self._column = self._row + 1, 0
                self.lines += [""] * (self._row + 1 - len(self.lines))
            piece, text = text[: self._columns - self._column], text[self._columns - self._column:]
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + piece + line[self._column + len(piece):]
            self._column += len(piece)
