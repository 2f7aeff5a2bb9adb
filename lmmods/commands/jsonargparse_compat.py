"""What commands need of jsonargparse, and of argparse below it, that neither documents.

Held by tests/compat/test_jsonargparse.py. Read in jsonargparse 4.53.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Every option of a parser: `_actions` of argparse, which has no public list of them."""
    return parser._actions


def type_of(option: argparse.Action) -> Any:
    """The type hint of an option, None where it has no such type: `_typehint` of jsonargparse's ActionTypeHint."""
    return getattr(option, "_typehint", None)


def take_no_files(parser: argparse.ArgumentParser) -> None:
    """Keep options whose value is an object from reading a string that happens to be a file as a configuration.

    `_enable_path` and `sub_add_kwargs` of ActionTypeHint; `add_subclass_arguments` has no `sub_configs`, which would
    replace both.
    """
    for option in options_of(parser):
        if getattr(option, "_enable_path", False):
            option._enable_path = False
            option.sub_add_kwargs["sub_configs"] = False


def hide_classes(option: argparse.Action, hide: Callable[[str], Any]) -> None:
    """Leave classes out of an option's help, by import path: ActionTypeHint's `extra_help` lists all that it knows."""
    listed = option.extra_help

    def without() -> str:
        head, colon, names = listed().partition(": ")
        return head + colon + ", ".join(name for name in names.split(", ") if not hide(name))

    option.extra_help = without


@contextlib.contextmanager
def kept_settings() -> Iterator[None]:
    """Put back at its end what `set_parsing_settings` changes within: `_common.parsing_settings`, a dictionary.

    The public function can neither read a setting nor lift a list of allowed imports.
    """
    from jsonargparse._common import parsing_settings

    before = dict(parsing_settings)
    try:
        yield
    finally:
        parsing_settings.update(before)
