"""Values of a recipe as objects: defaults filled in, mappings of settings and named classes instantiated."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from lmmods.core.errors import UserError
from lmmods.recipe.classes import import_path
from lmmods.recipe.keys import REQUIRED, block_in, keys_of, members


def fill(cls: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Return plain values of all fields of a class: the given settings, else defaults; nested ones as mappings."""
    values = {}
    for name, key in keys_of(cls).items():
        if name in settings or key.default is not REQUIRED:
            values[name] = fill_value(settings.get(name, key.default), key.type)
    return values


def fill_value(value: Any, hint: Any) -> Any:
    """Return a value of this type with the defaults of its settings filled in."""
    if isinstance(value, ClassArguments):
        return value
    if dataclasses.is_dataclass(value):
        return dict(vars(value))
    if isinstance(value, dict) and (cls := block_in(hint)):
        return fill(cls, value)
    if isinstance(value, list):
        return [fill_value(item, items_of(hint)) for item in value]
    # An integer may be given where the type is a number.
    return float(value) if type(value) is int and float in members(hint) and int not in members(hint) else value


@dataclass
class ClassArguments:
    """A class that a recipe names by `class_path`, with its `init_args`; or a function, which is not called."""

    kind: Any
    init_args: dict[str, Any]

    @property
    def class_path(self) -> str:
        """Import path of the class."""
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
    """Return values as written in a recipe.

    Arguments of a library's class that are null by default are omitted: a logger has some thirty options.
    """
    if isinstance(value, ClassArguments):
        keys = keys_of(value.kind) if inspect.isclass(value.kind) else {}
        arguments = {name: argument for name, argument in value.init_args.items()
                     if argument is not None or name in keys and keys[name].default is not None}
        return {"class_path": value.class_path, "init_args": without_objects(arguments)}
    if isinstance(value, dict):
        return {name: without_objects(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_objects(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def items_of(hint: Any) -> Any:
    """Return the type of a list's items."""
    return next((get_args(member)[0] for member in members(hint) if get_origin(member) is list), Any)


def objects(cls: Callable[..., Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Build the arguments of a constructor from settings: nested mappings become objects.

    Raises:
        UserError: A value is out of range.
    """
    keys = keys_of(cls)

    def build(value: Any, hint: Any) -> Any:
        if isinstance(value, list):
            return [build(item, items_of(hint)) for item in value]
        if isinstance(value, ClassArguments):
            return value.build()
        inner_class = block_in(hint) if isinstance(value, dict) else None
        return inner_class(**objects(inner_class, value)) if inner_class else value

    hints = {name: keys[name].type if name in keys else Any for name in settings}
    return {name: build(fill_value(value, hints[name]), hints[name]) for name, value in settings.items()}
