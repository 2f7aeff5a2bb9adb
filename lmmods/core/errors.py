"""What the user did wrong, told in one message. The CLI prints it without a traceback and exits with status 2."""

import re

from lmmods.core.redaction import redact


class UserError(Exception):
    """A mistake in the recipe, the data or the environment.

    The message says what is wrong, where (file and line, row, or key) and what to do about it. Passwords and tokens
    are taken out of it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(readable(redact(message)))


def readable(message: str) -> str:
    """A message without the greater part of words that no one reads to their end, such as a number of 5000 digits."""
    return re.sub(r"(\S{200})\S{400,}", r"\1…", message)


def user_error_in(error: BaseException) -> UserError | None:
    """The UserError among an exception and all that led to it; parsers wrap what constructors raise."""
    while error is not None:
        if isinstance(error, UserError):
            return error
        error = error.__cause__ or error.__context__
    return None


def first_line(error: BaseException) -> str:
    """What another library says is wrong, without the advice that follows; empty where it says nothing."""
    return next(iter(str(error).strip().splitlines()), "")


def one_line(error: BaseException) -> str:
    """All that another library says is wrong."""
    return " ".join(str(error).split())
