"""What commands need of jsonargparse, and of argparse below it, that neither documents.

Held by tests/compat/test_jsonargparse.py. Read in jsonargparse 4.53.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jsonargparse


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


def list_classes(option: argparse.Action, names: Iterable[str]) -> None:
    """Name these classes in an option's help: ActionTypeHint's `extra_help`, which lists all that are imported."""
    option.extra_help = lambda: f", known subclasses: {', '.join(names)}"


def replace_check(option: argparse.Action, check: Callable[[Callable[[Any], Any], Any, Any], Any]) -> None:
    """Let another function decide on an option's values: `_check_type` of ActionTypeHint, called for each of them.

    Args:
        check: Given the check of jsonargparse, a value and the one before it (None at first), returns what the option
            then holds. A value may be a pair (key, text): jsonargparse's form of `--model.key text`.
    """
    original = option._check_type

    def check_type(value: Any, append: bool = False, cfg: Any = None, mode: str | None = None) -> Any:
        return check(lambda each: original(each, append=append, cfg=cfg, mode=mode), value,
                     cfg.get(option.dest) if cfg else None)

    option._check_type = check_type


def parse_alone(parser: jsonargparse.ArgumentParser, arguments: list[str]) -> jsonargparse.Namespace:
    """What a command's parser makes of its arguments; the parser above it would check all of it a second time.

    Without `parent_parser`, which `add_subcommand` sets, it also prints its configuration itself.
    """
    vars(parser).pop("parent_parser", None)
    return parser.parse_args(arguments)


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
