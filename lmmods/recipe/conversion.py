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

    If the type includes strings, a value that does not match any other type is kept as written: `1234567`, `no`,
    `12345e67`. Mappings of blocks are returned unchanged.
    """
    # Mappings and lists match the first member of a union that is a mapping or a list.
    types = members(hint)
    if isinstance(value, dict):
        if any(block_in(member) for member in types):
            return value
        for member in types:
            if member is Any or member is dict:
                return plain(value)
            if get_origin(member) is dict:
                inner = {convert(name, get_args(member)[0]): convert(item, get_args(member)[1])
                         for name, item in value.items()}
                return WRONG if WRONG in inner or WRONG in inner.values() else inner
        return WRONG
    if isinstance(value, list):
        for member in types:
            if member is Any:
                return plain(value)
            if get_origin(member) is list:
                items = [convert(item, get_args(member)[0]) for item in value]
                return WRONG if any(item is WRONG for item in items) else items
        return WRONG
    return _convert_scalar(value, types)


def _convert_scalar(value: Any, types: tuple[Any, ...]) -> Any:
    # By type, not isinstance: true is not an integer, although bool derives from int.
    if not isinstance(value, Scalar):  # a plain value, whose text is unknown
        is_listed = any(get_origin(member) is Literal and value in get_args(member) for member in types)
        return value if is_listed or _fits(value, types) or type(value) is str and str in types else WRONG
    # `"3"` in quotes is a number too, unless the type includes strings.
    is_quoted = value.yaml_value == value and str not in types
    for candidate in (value.yaml_value, *([_unquote(value)] if is_quoted else [])):
        if _fits(candidate, types):
            return candidate
    for word in (listed for member in types if get_origin(member) is Literal for listed in get_args(member)):
        if word == value or type(word) is type(value.yaml_value) and word == value.yaml_value:
            return word
    if timedelta in types and str not in types and (parts := DURATION.fullmatch(value)):
        days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        return timedelta(days, seconds, minutes=minutes, hours=hours)
    if str in types:
        value.is_text = True
        return str(value)
    return WRONG


def _fits(value: Any, types: tuple[Any, ...]) -> bool:
    """Return True if a value has one of these types other than string."""
    return any(member is Any or member is type(value) and member is not str or member is float and type(value) is int
               for member in types)


def convert_word(value: Any, hint: Any) -> Any:
    """Convert null, true, false or a literal to a type that has classes too; `WRONG` for any other value."""
    words = [member for member in members(hint) if member in (bool, type(None)) or get_origin(member) is Literal]
    return _convert_scalar(value, tuple(words)) if isinstance(value, Scalar) else WRONG


def init_args_of(value: dict[Any, Any], cls: type) -> Any:
    """Return the settings of a block that is written with `class_path`; `WRONG` if it names another class."""
    named = plain(value.get("class_path", cls.__name__))
    settings = value.get("init_args") or {}
    if value.keys() - {"class_path", "init_args"} or not isinstance(settings, dict) or not isinstance(named, str):
        return WRONG
    package, _, name = named.rpartition(".")
    return settings if name == cls.__name__ and package.partition(".")[0] in ("", "lmmods") else WRONG


def _unquote(value: Scalar) -> Any:
    """Parse a quoted string as if it had no quotes."""
    read = read_value(str(value))
    return read.yaml_value if isinstance(read, Scalar) else value


def format_value(value: Any) -> str:
    """Format a value as in a recipe, on one line."""
    if isinstance(value, Scalar):
        return shorten(str(value)) if value else "null" if value.yaml_value is None else "empty"
    text = as_yaml(plain(value), default_flow_style=True, width=10**6).strip().removesuffix("\n...")
    return shorten(text)
