"""The last line of a terminal: it stays below everything that is printed, by whom ever, and breaks no line of it."""

import os
import sys
import threading
from typing import Any, TextIO

ERASE = "\r\033[J"  # from the beginning of the line to the end of the screen: a narrowed window folds the line


class StatusLine:
    """A line that is drawn again after each line printed above it.

    The cursor rests at its beginning, so that what is printed past `Above`, by a library in C say, covers it from the
    left rather than going on behind it.

    Args:
        terminal: Where it is drawn.
        erases: Whether another process draws such a line on the same terminal, which lines of this one replace.
    """

    def __init__(self, terminal: TextIO, erases: bool = False):
        self._terminal, self._erases = terminal, erases
        self._lock = threading.RLock()  # a signal may come while its own thread prints
        self._process = os.getpid()
        self._text = ""
        self._in_line = False  # whether a line above has been begun and not ended

    def show(self, text: str) -> None:
        """Draw `text`, cut to the width of the window as it is now; an empty one takes the line away."""
        with self._lock:
            shown, self._text = self._text, text
            if self._in_line and text and not shown:  # begun before there was a status line
                self.print("\n", self._terminal)
            elif not self._in_line and (text or shown):
                self._draw()

    def _draw(self) -> None:
        self._terminal.write(f"{ERASE}{self._text[:self.width() - 1]}\r" if self._text else ERASE)
        self._terminal.flush()

    def width(self) -> int:
        """Columns of the terminal; 80 where it does not say."""
        return os.get_terminal_size(self._terminal.fileno()).columns or 80

    def print(self, text: str, stream: TextIO) -> None:
        """Write `text` on `stream`, which is on the same terminal, above the line."""
        if os.getpid() != self._process:  # a fork: the line is drawn by its parent
            self._text, self._erases, self._process = "", True, os.getpid()
        with self._lock:
            if text and not self._in_line and (self._text or self._erases):
                text = ERASE + text
            stream.write(text)
            stream.flush()  # two streams are on the terminal, each with a buffer
            if text:
                self._in_line = not text.endswith(("\n", "\r"))  # with the latter, bars of tqdm take themselves away
            if not self._in_line and self._text:
                self._draw()


class Above:
    """In the place of a stream on the terminal: what is written goes above the status line."""

    def __init__(self, stream: TextIO, line: StatusLine):
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        self._line.print(text, self._stream)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def is_terminal(stream: Any) -> bool:
    """Whether a stream is on a terminal that knows where its cursor is."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def shows_colour(stream: Any) -> bool:
    """Whether to colour what is printed on a stream; see https://no-color.org."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


_line: StatusLine | None = None


def keep_last_line(erases: bool = False) -> None:
    """Let this process print above the status line, if its stderr is on a terminal. Call it before libraries that keep
    the streams, as those that log do; arguments as of `StatusLine`."""
    global _line
    if _line is not None or not is_terminal(sys.stderr):
        return
    _line = StatusLine(sys.stderr, erases)
    sys.stderr = Above(sys.stderr, _line)
    if is_terminal(sys.stdout):
        sys.stdout = Above(sys.stdout, _line)


def status_line() -> StatusLine | None:
    """The status line of this process; None where there is no terminal for it."""
    return _line
