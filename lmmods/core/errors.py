"""User-facing errors. The CLI prints a UserError as one message without a traceback and exits with status 2."""

import re

from lmmods.core.redaction import redact


class UserError(Exception):
    """A mistake in the recipe, the data or the environment.

    The message says what is wrong, where (file and line, row, or key) and what to do about it. Passwords and tokens in
    it are redacted.
    """

    def __init__(self, message: str) -> None:
        super().__init__(readable(redact(message)))


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
