"""Checks of settings that several data modules share."""

from lmmods.core.errors import UserError

MOST = 2**31 - 1  # what array libraries count rows and tokens with


def check_range(**limits: tuple[int | float | None, int] | tuple[int | float | None, int, int]) -> None:
    """Each keyword names a setting and gives (value, least value[, greatest value]); None is unset.

    Raises:
        UserError: A value is too small or too large.
    """
    for key, (value, least, *most) in limits.items():
        if value is not None and not value >= least:
            raise UserError(f"data.{key} is {value}, but must be {least} or more")
        if value is not None and value > (most[0] if most else MOST):
            raise UserError(f"data.{key} is {value}, but must be {most[0] if most else MOST} or less")
