"""User-facing errors. The CLI prints a UserError as one message without a traceback and exits with status 2."""

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar

from lmmods.core.redaction import redact


class UserError(Exception):
    """A mistake in the recipe, the data or the environment.

    The message says what is wrong, where (file and line, row, or key) and what to do about it. Passwords and tokens in
    it are redacted.
    """

    def __init__(self, message: str) -> None:
        super().__init__(readable(redact(message)))


_gathered: ContextVar[list[str] | None] = ContextVar("gathered", default=None)


@contextlib.contextmanager
def gathering() -> Iterator[list[str]]:
    """Within it, what is told of values that are wrong by themselves is kept in a list, so that all of it is told."""
    found: list[str] = []
    token = _gathered.set(found)
    try:
        yield found
    finally:
        _gathered.reset(token)


def refuse_value(message: str) -> None:
    """Raise a UserError about one value, or keep its message where all are `gathering`."""
    found = _gathered.get()
    if found is None:
        raise UserError(message)
    found.append(message)


def readable(message: str) -> str:
    """A message with very long words shortened, such as a number of 5000 digits."""
    return re.sub(r"(\S{200})\S{400,}", r"\1…", message)


def user_error_in(error: BaseException) -> UserError | None:
    """The UserError in the chain of causes of an exception, if any: parsers wrap what constructors raise."""
    while error is not None:
        if isinstance(error, UserError):
            return error
        error = error.__cause__ or error.__context__
    return None


def first_line(error: BaseException) -> str:
    """The first line of a library's message, without the advice that follows; empty if there is no message."""
    return next(iter(str(error).strip().splitlines()), "")


def one_line(error: BaseException) -> str:
    """A library's whole message on one line."""
    return " ".join(str(error).split())
