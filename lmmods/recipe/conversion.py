"""Convert values of a recipe to the types of their keys."""

import re
from datetime import timedelta
from typing import Any, Literal, get_args, get_origin

from lmmods.recipe.files import Scalar, as_yaml, plain, read_value, shorten
from lmmods.recipe.keys import block_in, members

WRONG = object()  # placeholder for a rejected value
DURATION = re.compile(r"(?:(\d+) days?, )?(\d+):(\d\d):(\d\d)")  # as Python writes it


def convert(value: Any, hint: Any) -> Any:
    """Convert a value to a type; `WRONG` if it does not match.

    If the type includes text, a value that matches none of its other types is kept as written: `1234567`, `no`,
    `12345e67`. Mappings of blocks are returned unchanged.
    """
    # Mappings and lists match the first member of a union that can hold them; blocks are read by `_block`.
    kinds = members(hint)
    if isinstance(value, dict):
        if any(block_in(each) for each in kinds):
            return value
        for each in kinds:
            if each is Any or each is dict:
                return plain(value)
            if get_origin(each) is dict:
                inner = {convert(name, get_args(each)[0]): convert(item, get_args(each)[1])
                         for name, item in value.items()}
                return WRONG if WRONG in inner or WRONG in inner.values() else inner
        return WRONG
    if isinstance(value, list):
        for each in kinds:
            if each is Any:
                return plain(value)
            if get_origin(each) is list:
                items = [convert(item, get_args(each)[0]) for item in value]
                return WRONG if any(item is WRONG for item in items) else items
        return WRONG
    return _scalar(value, kinds)


def _scalar(value: Any, kinds: tuple[Any, ...]) -> Any:
    # By type, not isinstance: true is not an integer, although bool derives from int.
    if not isinstance(value, Scalar):  # a plain value, whose text is not known
        is_listed = any(get_origin(each) is Literal and value in get_args(each) for each in kinds)
        return value if is_listed or _fits(value, kinds) or type(value) is str and str in kinds else WRONG
    # `"3"` in quotes is a number, too, where no text is possible.
    is_quoted = value.yaml_value == value and str not in kinds
    for read in (value.yaml_value, *([_unquote(value)] if is_quoted else [])):
        if _fits(read, kinds):
            return read
    for each in (listed for kind in kinds if get_origin(kind) is Literal for listed in get_args(kind)):
        if each == value or type(each) is type(value.yaml_value) and each == value.yaml_value:
            return each
    if timedelta in kinds and str not in kinds and (parts := DURATION.fullmatch(value)):
        days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        return timedelta(days, seconds, minutes=minutes, hours=hours)
    if str in kinds:
        value.is_text = True
        return str(value)
    return WRONG


def _fits(value: Any, kinds: tuple[Any, ...]) -> bool:
    """True if a value has one of these types other than text."""
    return any(each is Any or each is type(value) and each is not str or each is float and type(value) is int
               for each in kinds)


def converted_word(value: Any, hint: Any) -> Any:
    """Convert null, true, false or a listed word to a type that has classes too; `WRONG` for any other value."""
    words = [each for each in members(hint) if each in (bool, type(None)) or get_origin(each) is Literal]
    return _scalar(value, tuple(words)) if isinstance(value, Scalar) else WRONG


def init_args_of(value: dict[Any, Any], kind: type) -> Any:
    """Return the settings of a block that is written as a class; `WRONG` if the class is another one."""
    named = plain(value.get("class_path", kind.__name__))
    settings = value.get("init_args") or {}
    if value.keys() - {"class_path", "init_args"} or not isinstance(settings, dict) or not isinstance(named, str):
        return WRONG
    package, _, name = named.rpartition(".")
    return settings if name == kind.__name__ and package.partition(".")[0] in ("", "lmmods") else WRONG


def _unquote(value: Scalar) -> Any:
    """Parse a quoted text as if it had no quotes."""
    read = read_value(str(value))
    return read.yaml_value if isinstance(read, Scalar) else value


def format_value(value: Any) -> str:
    """Format a value as in a recipe, on one line."""
    if isinstance(value, Scalar):
        return shorten(str(value)) if value else "null" if value.yaml_value is None else "empty"
    text = as_yaml(plain(value), default_flow_style=True, width=10**6).strip().removesuffix("\n...")
    return shorten(text)
