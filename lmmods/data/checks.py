"""Checks of settings that several data modules share."""

from lmmods.errors import UserError


def check_least(**limits: tuple[int | float | None, int]) -> None:
    """Each keyword names a setting and gives (value, least value); None is unset.

    Raises:
        UserError: A value is too small.
    """
    for key, (value, least) in limits.items():
        if value is not None and value < least:
            raise UserError(f"data.{key} is {value}, but must be {least} or more")
