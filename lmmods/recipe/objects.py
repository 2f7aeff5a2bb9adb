"""Values of a recipe as objects: defaults filled in, mappings of settings and named classes instantiated."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from lmmods.core.errors import UserError
from lmmods.recipe.classes import import_path
from lmmods.recipe.keys import REQUIRED, block_in, keys_of, members


def fill(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Return plain values of all fields of a class: the given ones, else defaults; nested settings as mappings."""
    values = {}
    for name, key in keys_of(kind).items():
        if name in given or key.default is not REQUIRED:
            values[name] = fill_value(given.get(name, key.default), key.type)
    return values


def fill_value(value: Any, hint: Any) -> Any:
    if isinstance(value, ClassArguments):
        return value
    if dataclasses.is_dataclass(value):
        return dict(vars(value))
    if isinstance(value, dict) and (kind := block_in(hint)):
        return fill(kind, value)
    if isinstance(value, list):
        return [fill_value(each, items_of(hint)) for each in value]
    # An integer may be given where the type is a number.
    return float(value) if type(value) is int and float in members(hint) and int not in members(hint) else value


@dataclass
class ClassArguments:
    """A class that a recipe names by `class_path`, with its `init_args`; or a function, which is not called."""

    kind: Any
    init_args: dict[str, Any]

    @property
    def class_path(self) -> str:
        """The import path."""
        return import_path(self.kind)

    def build(self) -> Any:
        """Return the instance. Raises UserError: a class of Lightning does not accept the arguments."""
        if not inspect.isclass(self.kind):
            return self.kind
        arguments = objects(self.kind, self.init_args)
        try:
            return self.kind(**arguments)
        except Exception as error:
            from lightning.pytorch.utilities.exceptions import MisconfigurationException

            if not self.kind.__module__.startswith("lightning.") or not isinstance(
                    error, MisconfigurationException | ModuleNotFoundError | TypeError | ValueError):
                raise
            raise UserError(f"{self.kind.__name__}: {error}") from error


def without_objects(value: Any) -> Any:
    """Return values as a recipe writes them.

    Of a library's class, keys that are null and default to null are left out: a logger has some thirty options.
    """
    if isinstance(value, ClassArguments):
        keys = keys_of(value.kind) if inspect.isclass(value.kind) else {}
        arguments = {name: each for name, each in value.init_args.items()
                     if each is not None or name in keys and keys[name].default is not None}
        return {"class_path": value.class_path, "init_args": without_objects(arguments)}
    if isinstance(value, dict):
        return {name: without_objects(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_objects(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def items_of(hint: Any) -> Any:
    """Return the type of a list's items."""
    return next((get_args(each)[0] for each in members(hint) if get_origin(each) is list), Any)


def objects(kind: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the given values with mappings of settings made into objects, as constructors take them.

    Raises:
        UserError: A value is out of range.
    """
    keys = keys_of(kind)

    def made(value: Any, hint: Any) -> Any:
        if isinstance(value, list):
            return [made(each, items_of(hint)) for each in value]
        if isinstance(value, ClassArguments):
            return value.build()
        inner = block_in(hint) if isinstance(value, dict) else None
        return inner(**objects(inner, value)) if inner else value

    hints = {name: keys[name].type if name in keys else Any for name in given}
    return {name: made(fill_value(value, hints[name]), hints[name]) for name, value in given.items()}
