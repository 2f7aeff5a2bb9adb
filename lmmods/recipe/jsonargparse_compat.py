"""Access to undocumented internals of jsonargparse and argparse.

Covered by tests/compat/test_jsonargparse.py. Source: jsonargparse 4.53.
"""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return all options of a parser: argparse's `_actions`, as there is no public list."""
    return parser._actions


def type_of(option: argparse.Action) -> Any:
    """Return the type hint of an option, None if it has none: `_typehint` of jsonargparse's ActionTypeHint."""
    return getattr(option, "_typehint", None)


def take_no_files(parser: argparse.ArgumentParser) -> None:
    """Stop object-valued options from loading a string that happens to name a file as a configuration.

    Sets `_enable_path` and `sub_add_kwargs` of ActionTypeHint: `add_subclass_arguments` lacks the public
    `sub_configs` parameter, which would do the same.
    """
    for option in options_of(parser):
        if getattr(option, "_enable_path", False):
            option._enable_path = False
            option.sub_add_kwargs["sub_configs"] = False


@contextlib.contextmanager
def kept_settings() -> Iterator[None]:
    """Restore jsonargparse's `_common.parsing_settings` on exit, undoing any `set_parsing_settings` within.

    The public function can neither read a setting nor remove a list of allowed imports.
    """
    from jsonargparse._common import parsing_settings

    before = dict(parsing_settings)
    try:
        yield
    finally:
        parsing_settings.update(before)
