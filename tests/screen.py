"""Show what a terminal shows: a pseudo-terminal with the few control sequences that our output uses."""

import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path


class Screen:
    """A terminal with `columns` that keeps lines that have scrolled away.

    Attributes:
        path: Path of the end that a program prints to.
        lines: Lines from the first to the lowest one written so far.
    """

    def __init__(self, columns: int = 80):
        self._reader, self._writer = pty.openpty()
        self.path = Path(os.ttyname(self._writer))
        self.lines, self._row, self._column = [""], 0, 0
        self.resize(columns)
        os.set_blocking(self._reader, False)
        self._unread = ""

    def resize(self, columns: int) -> None:
        """Change the width; existing lines are not wrapped again. Width 0 hides the width, which is 80."""
        self._columns = columns or 80
        fcntl.ioctl(self._writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def open(self):
        """Return the program's end as a text stream."""
        return open(os.dup(self._writer), "w", encoding="utf-8", buffering=1)

    def look(self) -> list[str]:
        """Read what has been printed so far and return the lines that are not empty."""
        while True:
            try:
                self._take(os.read(self._reader, 65536).decode())
            except BlockingIOError:
                return [line.rstrip() for line in self.lines if line.strip()]

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def _take(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\d*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self._unread + text):
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
                assert re.fullmatch(r"\x1b\[\d*m", part), f"unexpected control sequence: {part!r}"
            else:
                self._print(part)

    def _print(self, text: str) -> None:
        while text:
            if self._column == self._columns:  # the line wraps
                self._row, self._column = self._row + 1, 0
                self.lines += [""] * (self._row + 1 - len(self.lines))
            chunk, text = text[: self._columns - self._column], text[self._columns - self._column:]
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + chunk + line[self._column + len(chunk):]
            self._column += len(chunk)
