"""Keys of command lines and recipes, with type, default and description.

They are read from the dataclasses of fields, which do not import heavy libraries, and from the command functions.
"""

import collections.abc
import dataclasses
import difflib
import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser

from lmmods.recipe.block_fields import CheckpointFields, MMLUFields, PublishFields, SampleFields
from lmmods.recipe.classes import declared
from lmmods.recipe.engines import ENGINES
from lmmods.recipe.tasks.base import DataFields, TaskFields
from lmmods.recipe.trainer_fields import JaxTrainerFields, TorchTrainerFields

REQUIRED = inspect.Parameter.empty
TRAINERS = {"torch": TorchTrainerFields, "jax": JaxTrainerFields}
BLOCKS = {"checkpoint": CheckpointFields, "samples": SampleFields, "mmlu": MMLUFields, "publish": PublishFields}
DEFAULT_SEED = 42
PATHS = ("path", "default_root_dir", "cache_dir", "adapter")  # keys whose string is always a path
WORDS = {str: ("a string", "strings"), int: ("an integer", "integers"), float: ("a number", "numbers"),
         bool: ("a boolean", "booleans"), type(None): ("null", "null"), Any: ("any value", "any values")}


@dataclass(frozen=True)
class Key:
    """Key of a recipe, or option of a command.

    Args:
        name: Full dotted name without `init_args`: `model.lora.rank`.
        type: Type hint.
        default: Default value, `REQUIRED` if there is none.
        text: Description.
    """

    name: str
    type: Any
    default: Any
    text: str


def keys_of(cls: Callable[..., Any], prefix: str = "") -> dict[str, Key]:
    """Return the arguments of a function or constructor as keys under `prefix`, by argument name."""
    return {name: Key(f"{prefix}.{name}".removeprefix("."), hint, default, text)
            for name, (hint, default, text) in _arguments(cls).items()}


@functools.cache
def _arguments(cls: Callable[..., Any]) -> dict[str, tuple[Any, Any, str]]:
    # A signature has a placeholder for the default of a factory.
    factory_defaults = {item.name: item.default_factory() for item in dataclasses.fields(cls)
                        if item.default_factory is not dataclasses.MISSING} if dataclasses.is_dataclass(cls) else {}
    texts = _texts(cls)
    return {name: (_readable(item.annotation), factory_defaults.get(name, item.default), texts.get(name, ""))
            for name, item in _signature_of(cls)[0].items()}


def takes_any_key(cls: Callable[..., Any]) -> bool:
    """Return True if a function or constructor has `**kwargs` that do not go to the constructor of a base class."""
    return _signature_of(cls)[1]


@functools.cache
def _signature_of(cls: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the named arguments of a function or constructor, and whether it takes any others.

    Arguments of a base class count if a constructor passes its `**kwargs` on: `super().__init__(**kwargs)`.
    """
    functions = [cls] if not inspect.isclass(cls) else [
        vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base) and base is not object]
    named: dict[str, inspect.Parameter] = {}
    fixed: set[str] = set()  # arguments of a base class that a constructor sets itself
    for function in functions:
        parameters = inspect.signature(function).parameters
        try:
            hints = get_type_hints(function)
        except NameError:  # names that only type checkers import
            hints = {name: Any if isinstance(parameter.annotation, str) else parameter.annotation
                     for name, parameter in parameters.items()}
        rest = None
        for name, parameter in parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                rest = name
            elif parameter.kind is not parameter.VAR_POSITIONAL and name not in ("self", *fixed):
                named.setdefault(name, parameter.replace(annotation=hints.get(name, Any)))
        if rest is None:
            return named, False
        call = re.search(rf"super\([^)]*\)\.__init__\((?:[^()]|\([^()]*\))*\*\*{rest}\b", inspect.getsource(function))
        if call is None:
            return named, True
        fixed |= set(re.findall(r"(\w+)=", call[0]))
    return named, False


def _readable(hint: Any) -> Any:
    """Convert a type hint to the types that recipes are read by; other types become Any, and are not checked."""
    readable_types: list[Any] = []
    for member in members(hint):
        outer = get_origin(member) or member
        if outer is Literal:
            readable_types += [member, *([bool] if any(isinstance(value, bool) for value in get_args(member)) else [])]
        elif member in WORDS or member is timedelta:
            readable_types.append(member)
        elif outer is collections.abc.Callable:
            readable_types.append(outer)
        elif not inspect.isclass(outer):
            readable_types.append(Any)
        elif issubclass(outer, os.PathLike):
            readable_types.append(str)
        elif issubclass(outer, collections.abc.Mapping):
            name, value = get_args(member) or (Any, Any)
            readable_types.append(types.GenericAlias(dict, (_readable(name), _readable(value))))
        elif issubclass(outer, collections.abc.Iterable) and outer.__module__ in ("builtins", "collections.abc"):
            items = tuple(_readable(part) for part in get_args(member) if part is not ...)
            readable_types.append(types.GenericAlias(list, items or (Any,)))
        else:
            is_plain = issubclass(outer, Enum) or outer.__module__.partition(".")[0] in ("builtins", "torch")
            readable_types.append(Any if is_plain or get_args(member) else outer)
    return Union[tuple(readable_types)]  # noqa: UP007 - members from a list


def _texts(cls: Callable[..., Any]) -> dict[str, str]:
    """Return the argument descriptions in the docstrings of a function, or of a class and its bases."""
    return {param.arg_name: " ".join((param.description or "").split())
            # Base classes first, so that a subclass may describe an argument again.
            for base in reversed(cls.__mro__ if inspect.isclass(cls) else [cls])
            for param in docstring_parser.parse(base.__doc__ or "").params}


def recipe_keys(options: dict[str, Key], engine: str) -> dict[str, Key]:
    """Return the top-level keys of a recipe, with the options of the command that takes it."""
    blocks = {"trainer": TRAINERS[engine], "model": TaskFields, "data": DataFields, **BLOCKS}
    return {
        **options,
        "seed_everything": Key("seed_everything", bool | int, DEFAULT_SEED,
                               "Seed for initial weights, dropout, data order and splits, 0 to 4294967295. true picks "
                               "one at random."),
        "engine": Key("engine", Literal[ENGINES], "torch", "torch (Lightning) or jax (Flax)."),
        # Every command accepts it, as a recipe written for fit may set it.
        **({} if "overwrite" in options else {"overwrite": Key("overwrite", bool, False, "")}),
        **{name: Key(name, cls, REQUIRED, _summary(cls)) for name, cls in blocks.items()}}


def _summary(cls: type) -> str:
    return (cls.__doc__ or "").split("\n\n")[0].strip()


def members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; any other type is its own single member."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def block_in(hint: Any) -> type | None:
    """Return the project's dataclass in a type hint, whose fields a mapping may set; None if there is none."""
    return next((member for member in members(hint) if _is_block(member)), None)


def only_block_in(hint: Any) -> type:
    """Like `block_in`, for a type hint that has such a class."""
    block = block_in(hint)
    assert block is not None, hint
    return block


def _is_block(cls: Any) -> bool:
    return inspect.isclass(cls) and dataclasses.is_dataclass(cls)


def library_classes(hint: Any) -> tuple[type, ...]:
    """Return the library classes in a type, or in the items of its lists; a recipe names a subclass by `class_path`."""
    # A class that is neither a plain type nor a block of this project belongs to a library.
    plain = (*WORDS, dict, list, timedelta)
    return tuple(cls for member in members(hint) for cls in (
        library_classes(get_args(member)[0]) if get_origin(member) is list else
        (member,) if inspect.isclass(member) and get_origin(member) is None and not _is_block(member)
        and member not in plain else ()))


def walk(keys: dict[str, Key], classes: dict[str, tuple[type, ...]]) -> Iterator[Key]:
    """Yield all keys, the keys of a block after the block itself.

    Args:
        classes: Candidate classes of `model` and `data`.
    """
    for key in keys.values():
        yield key
        inner: dict[str, Key] = {}
        block_class = block_in(key.type)
        for cls in classes.get(key.name, (block_class,) if block_class else ()):
            # A key that several classes have appears once.
            inner |= {name: inner_key for name, inner_key in keys_of(cls, key.name).items() if name not in inner}
        yield from walk(inner, {})


def task_classes(block: str) -> tuple[type, ...]:
    """Return the fields of every declared class of `model` or `data`."""
    return tuple(declared(block).values())


def nearest(name: str, names: list[str]) -> str | None:
    """Return the known key nearest to a misspelt one; None if none is near."""
    parent, _, leaf = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in names if key.rpartition(".")[0] == parent}
    # In the key's own block first: a name that starts like it, then a similar one.
    completions = sorted((key for key in siblings if len(leaf) > 1 and key.startswith(leaf)), key=len)
    if near := completions[:1] or difflib.get_close_matches(leaf, siblings, 1, 0.7):
        return siblings[near[0]]
    # Then elsewhere in the top-level block, and last in all of the recipe: the same leaf, a similar name, a similar
    # leaf.
    block = name.partition(".")[0]
    for candidates in ([key for key in names if key.partition(".")[0] == block], names):
        elsewhere: dict[str, str] = {}
        for key in candidates:
            elsewhere.setdefault(key.rpartition(".")[2], key)
        if leaf in elsewhere:
            return elsewhere[leaf]
        if near := difflib.get_close_matches(name, candidates, 1, 0.8):
            return near[0]
        if near := difflib.get_close_matches(leaf, elsewhere, 1, 0.75):
            return elsewhere[near[0]]
    return None


def in_words(hint: Any, name: str = "", as_type: bool = False) -> str:
    """Describe the values of a type: `an integer or null`, `one of nf4, fp4, int8, or null`, `true or false`.

    Args:
        name: Name of the key with this type.
        as_type: Name the type itself, for help and tables: `integer or null`, `boolean`.
    """
    words: list[str] = []
    parts: list[str] = []
    has_null = False
    for member in members(hint):
        if get_origin(member) is Literal:
            words += map(str, get_args(member))
        elif member is type(None):
            has_null = True
        elif member is bool and (not as_type or listed_in(hint)):
            words += ["true", "false"]
        # "a number" covers integers, and "a string" a duration.
        elif not (member is int and float in members(hint) or member is timedelta and str in members(hint)):
            parts.append(_phrase(member, name))
    parts = list(dict.fromkeys(re.sub(r"^an? | of its keys$", "", part) if as_type else part for part in parts))
    if len(words) > 2 and not parts:
        return f"one of {', '.join(words)}" + (", or null" if has_null else "")
    # A comma before the last `or`, where a part has one of its own.
    if has_null and any(" or " in part for part in parts):
        return f"{_join([*words, *parts])}, or null"
    return _join([*words, *parts, *(["null"] if has_null else [])])


def listed_in(hint: Any) -> list[str]:
    """Return the literal values that a type enumerates."""
    return [str(value) for member in members(hint) if get_origin(member) is Literal for value in get_args(member)]


def _join(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} or {parts[-1]}" if len(parts) > 1 else parts[0]


def _phrase(hint: Any, name: str) -> str:
    if get_origin(hint) is list:
        return f"a list of {_plural(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        inner = get_args(hint)[1]
        return "a mapping" if inner is Any else f"a mapping of names to {_plural(inner)}"
    if block_in(hint):
        return "a mapping of its keys"
    if hint is str and name.rpartition(".")[2] in PATHS:
        return "a path"
    return WORDS[hint][0] if hint in WORDS else "a duration" if hint is timedelta else "a class"


def _plural(hint: Any) -> str:
    if len(members(hint)) > 1:
        parts = [_plural(member) for member in members(hint)
                 if member is not type(None) and (member is not int or float not in members(hint))]
        return _join(list(dict.fromkeys(parts)))
    return WORDS[hint][1] if hint in WORDS else "mappings" if block_in(hint) else "classes"
