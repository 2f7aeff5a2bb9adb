"""Keys of command lines and recipes, with type, default and description.

They are read from the dataclasses of fields, which import no heavy library, and from the command functions.
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


def keys_of(kind: Callable[..., Any], prefix: str = "") -> dict[str, Key]:
    """Return the arguments of a function or constructor as keys under `prefix`, by argument name."""
    return {name: Key(f"{prefix}.{name}".removeprefix("."), hint, default, text)
            for name, (hint, default, text) in _arguments(kind).items()}


@functools.cache
def _arguments(kind: Callable[..., Any]) -> dict[str, tuple[Any, Any, str]]:
    # A signature shows a factory instead of the default that it makes.
    made = {each.name: each.default_factory() for each in dataclasses.fields(kind)
            if each.default_factory is not dataclasses.MISSING} if dataclasses.is_dataclass(kind) else {}
    texts = _texts(kind)
    return {name: (_readable(each.annotation), made.get(name, each.default), texts.get(name, ""))
            for name, each in _signature_of(kind)[0].items()}


def takes_any_key(kind: Callable[..., Any]) -> bool:
    """True if a function or constructor has `**kwargs` that do not go to the constructor of a base class."""
    return _signature_of(kind)[1]


@functools.cache
def _signature_of(kind: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the named arguments of a function or constructor, and whether it takes any others.

    Arguments of a base class count where a constructor hands its `**kwargs` on: `super().__init__(**kwargs)`.
    """
    functions = [kind] if not inspect.isclass(kind) else [
        vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base) and base is not object]
    named: dict[str, inspect.Parameter] = {}
    fixed: set[str] = set()  # arguments of a base class that a constructor sets itself
    for function in functions:
        parameters = inspect.signature(function).parameters
        try:
            hints = get_type_hints(function)
        except NameError:  # names that only type checkers import
            hints = {name: Any if isinstance(each.annotation, str) else each.annotation
                     for name, each in parameters.items()}
        rest = None
        for name, each in parameters.items():
            if each.kind is each.VAR_KEYWORD:
                rest = name
            elif each.kind is not each.VAR_POSITIONAL and name not in ("self", *fixed):
                named.setdefault(name, each.replace(annotation=hints.get(name, Any)))
        if rest is None:
            return named, False
        call = re.search(rf"super\([^)]*\)\.__init__\((?:[^()]|\([^()]*\))*\*\*{rest}\b", inspect.getsource(function))
        if call is None:
            return named, True
        fixed |= set(re.findall(r"(\w+)=", call[0]))
    return named, False


def _readable(hint: Any) -> Any:
    """Return a type hint in the types that recipes are read by; other types become Any, and are not checked."""
    kinds: list[Any] = []
    for each in members(hint):
        outer = get_origin(each) or each
        if outer is Literal:
            kinds += [each, *([bool] if any(isinstance(value, bool) for value in get_args(each)) else [])]
        elif each in WORDS or each is timedelta:
            kinds.append(each)
        elif outer is collections.abc.Callable:
            kinds.append(outer)
        elif not inspect.isclass(outer):
            kinds.append(Any)
        elif issubclass(outer, os.PathLike):
            kinds.append(str)
        elif issubclass(outer, collections.abc.Mapping):
            name, value = get_args(each) or (Any, Any)
            kinds.append(types.GenericAlias(dict, (_readable(name), _readable(value))))
        elif issubclass(outer, collections.abc.Iterable) and outer.__module__ in ("builtins", "collections.abc"):
            items = tuple(_readable(part) for part in get_args(each) if part is not ...)
            kinds.append(types.GenericAlias(list, items or (Any,)))
        else:
            is_plain = issubclass(outer, Enum) or outer.__module__.partition(".")[0] in ("builtins", "torch")
            kinds.append(Any if is_plain or get_args(each) else outer)
    return Union[tuple(kinds)]  # noqa: UP007 - members from a list


def _texts(kind: Callable[..., Any]) -> dict[str, str]:
    """Return the argument descriptions in the docstrings of a function, or of a class and its bases."""
    return {each.arg_name: " ".join((each.description or "").split())
            # Base classes first, so that a subclass may describe an argument again.
            for base in reversed(kind.__mro__ if inspect.isclass(kind) else [kind])
            for each in docstring_parser.parse(base.__doc__ or "").params}


def recipe_keys(options: dict[str, Key], engine: str) -> dict[str, Key]:
    """Return the top-level keys of a recipe, with the options of the command that takes it."""
    blocks = {"trainer": TRAINERS[engine], "model": TaskFields, "data": DataFields, **BLOCKS}
    return {
        **options,
        "seed_everything": Key("seed_everything", bool | int, DEFAULT_SEED,
                               "Seed for initial weights, dropout, data order and splits, 0 to 4294967295. true picks "
                               "one at random."),
        "engine": Key("engine", Literal[ENGINES], "torch", "torch (Lightning) or jax (Flax)."),
        # Accepted by every command, as a recipe written for fit may set it.
        **({} if "overwrite" in options else {"overwrite": Key("overwrite", bool, False, "")}),
        **{name: Key(name, kind, REQUIRED, _summary(kind)) for name, kind in blocks.items()}}


def _summary(kind: type) -> str:
    return (kind.__doc__ or "").split("\n\n")[0].strip()


def members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; any other type is its own single member."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def block_in(hint: Any) -> type | None:
    """Return the project's class in a type hint whose fields a mapping may set; None if there is none."""
    return next((each for each in members(hint) if _is_block(each)), None)


def only_block_in(hint: Any) -> type:
    """Return the project's class in a type hint that has one."""
    block = block_in(hint)
    assert block is not None, hint
    return block


def _is_block(kind: Any) -> bool:
    return inspect.isclass(kind) and dataclasses.is_dataclass(kind)


def library_classes(hint: Any) -> tuple[type, ...]:
    """Return the classes in a type, or in the items of its lists, of which a recipe names a subclass by `class_path`.
    """
    # A class that is neither a plain type nor a block of ours belongs to a library.
    return tuple(kind for each in members(hint) for kind in (
        library_classes(get_args(each)[0]) if get_origin(each) is list else
        (each,) if inspect.isclass(each) and get_origin(each) is None and not _is_block(each) and each not in WORDS
        and each not in (dict, list, timedelta) else ()))


def walk(keys: dict[str, Key], classes: dict[str, tuple[type, ...]]) -> Iterator[Key]:
    """Yield all keys, the keys of a block after the block itself.

    Args:
        classes: Candidate classes of `model` and `data`.
    """
    for key in keys.values():
        yield key
        seen: dict[str, Key] = {}
        kind = block_in(key.type)
        for each in classes.get(key.name, (kind,) if kind else ()):
            # A key that several classes have appears once.
            seen |= {name: inner for name, inner in keys_of(each, key.name).items() if name not in seen}
        yield from walk(seen, {})


def task_classes(block: str) -> tuple[type, ...]:
    """Return the fields of every declared class of `model` or `data`."""
    return tuple(declared(block).values())


def nearest(name: str, names: list[str]) -> str | None:
    """Return the known key nearest to a misspelt one; None if none is near."""
    parent, _, leaf = name.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in names if each.rpartition(".")[0] == parent}
    # In its own block first: a name that starts like it, then a similar one.
    begun = sorted((each for each in siblings if len(leaf) > 1 and each.startswith(leaf)), key=len)
    if near := begun[:1] or difflib.get_close_matches(leaf, siblings, 1, 0.7):
        return siblings[near[0]]
    # Then elsewhere in the top-level block, and last in all of the recipe: the same leaf, a similar name, a similar
    # leaf.
    block = name.partition(".")[0]
    for candidates in ([each for each in names if each.partition(".")[0] == block], names):
        elsewhere: dict[str, str] = {}
        for each in candidates:
            elsewhere.setdefault(each.rpartition(".")[2], each)
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
    listed: list[str] = []
    parts: list[str] = []
    has_null = False
    for each in members(hint):
        if get_origin(each) is Literal:
            listed += map(str, get_args(each))
        elif each is type(None):
            has_null = True
        elif each is bool and (not as_type or listed_in(hint)):
            listed += ["true", "false"]
        # "a number" covers integers, and "a string" a duration.
        elif not (each is int and float in members(hint) or each is timedelta and str in members(hint)):
            parts.append(_phrase(each, name))
    parts = list(dict.fromkeys(re.sub(r"^an? | of its keys$", "", part) if as_type else part for part in parts))
    if len(listed) > 2 and not parts:
        return f"one of {', '.join(listed)}" + (", or null" if has_null else "")
    # A comma before the last `or`, where a part has one of its own.
    if has_null and any(" or " in each for each in parts):
        return f"{_join([*listed, *parts])}, or null"
    return _join([*listed, *parts, *(["null"] if has_null else [])])


def listed_in(hint: Any) -> list[str]:
    """Return the literal values that a type enumerates."""
    return [str(value) for each in members(hint) if get_origin(each) is Literal for value in get_args(each)]


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
        parts = [_plural(each) for each in members(hint)
                 if each is not type(None) and (each is not int or float not in members(hint))]
        return _join(list(dict.fromkeys(parts)))
    return WORDS[hint][1] if hint in WORDS else "mappings" if block_in(hint) else "classes"
