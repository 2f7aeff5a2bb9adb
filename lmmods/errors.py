"""What the user did wrong, told in one message. The CLI prints it without a traceback and exits with status 2."""


class UserError(Exception):
    """A mistake in the recipe, the data or the environment.

    The message says what is wrong, where (file and line, row, or key) and what to do about it.
    """


def user_error_in(error: BaseException) -> UserError | None:
    """The UserError among an exception and all that led to it; parsers wrap what constructors raise."""
    while error is not None:
        if isinstance(error, UserError):
            return error
        error = error.__cause__ or error.__context__
    return None
