"""Access to undocumented internals of jsonargparse and argparse.

Covered by tests/compat/test_jsonargparse.py. Source: jsonargparse 4.53.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jsonargparse


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


def list_classes(option: argparse.Action, names: Iterable[str]) -> None:
    """List only these classes in an option's help; by default ActionTypeHint's `extra_help` lists all imported ones."""
    option.extra_help = lambda: f", known subclasses: {', '.join(names)}"


def replace_check(option: argparse.Action, check: Callable[[Callable[[Any], Any], Any, Any], Any]) -> None:
    """Replace the check of an option's values: ActionTypeHint's `_check_type`, called for each value.

    Args:
        check: Takes jsonargparse's check, the value and the previous value (None at first), and returns the value to
            store. A value may be a pair (key, text): jsonargparse's form of `--model.key text`.
    """
    original = option._check_type

    def check_type(value: Any, append: bool = False, cfg: Any = None, mode: str | None = None) -> Any:
        return check(lambda each: original(each, append=append, cfg=cfg, mode=mode), value,
                     cfg.get(option.dest) if cfg else None)

    option._check_type = check_type


def parse_alone(parser: jsonargparse.ArgumentParser, arguments: list[str]) -> jsonargparse.Namespace:
    """Parse with a subcommand's parser directly; the top-level parser would check everything a second time.

    Removes `parent_parser`, set by `add_subcommand`, so that the subcommand's parser handles --print_config itself.
    """
    vars(parser).pop("parent_parser", None)
    return parser.parse_args(arguments)


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
