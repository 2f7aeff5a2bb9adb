"""Restrict the code that a recipe may run to lightning, torch and this project, unless the command line allows more.

Recipes are shared: a run's config.yaml is published, copied and mailed. It is therefore treated as data without
`--trust_recipe_code true`, which a file cannot contain. Three checks enforce this: nothing outside `PACKAGES` is
imported, as importing already runs code; only classes of the key's type are built, never functions; and code shipped
with a model runs only if the command line, not the file, asks for it.
"""

import collections.abc
import contextlib
import inspect
import pkgutil
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from lmmods.core.errors import UserError, one_line
from lmmods.recipe.files import TRUST_KEY

PACKAGES = ("lightning", "torch", "lmmods", "jax_engine")  # the last two hold user-defined tasks and families too
FLAG = f"--{TRUST_KEY}"
ANSWERS = {"true": True, "false": False}

_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


def pop_trust_flag(arguments: list[str]) -> tuple[list[str], bool]:
    """Return the arguments without `--trust_recipe_code`, and whether it was true.

    Raises:
        UserError: The flag is neither true nor false.
    """
    rest: list[str] = []
    answer = "false"
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == FLAG:
            # `--flag value` as well as `--flag=value`; the last one counts.
            answer = value if equals else next(words, "nothing")
        else:
            rest.append(word)
    if answer.lower() not in ANSWERS:
        raise UserError(f"--trust_recipe_code is {answer}, but must be true or false.")
    return rest, ANSWERS[answer.lower()]


@contextlib.contextmanager
def trusting(trusted: bool) -> Iterator[None]:
    """Set the result of `is_trusted` within the context."""
    token = _trusted.set(trusted)
    try:
        yield
    finally:
        _trusted.reset(token)


def is_trusted() -> bool:
    """Return True if the command line lets recipes run any code."""
    return _trusted.get()


class ForeignCode(UserError):
    """Error: a recipe names code that it may not run."""


def refuse_import(key: str | None, path: str) -> None:
    """Raise ForeignCode for a class or function outside `PACKAGES`."""
    raise ForeignCode(f"{key or 'The recipe'}: {path} is code outside of lightning, torch, lmmods and jax_engine, "
                      "which a recipe may not run. It has not run. If you have read it and trust it, add "
                      "--trust_recipe_code true to the command line.")


def import_class(path: str, bases: tuple[Any, ...], key: str) -> Any:
    """Import the class at an import path, or a function if the command line trusts the recipe.

    Args:
        bases: Allowed base classes.

    Raises:
        UserError: There is no such class, it has another base, or the recipe may not name it.
    """
    if path.partition(".")[0] not in PACKAGES and not is_trusted():
        refuse_import(key, path)
    try:
        cls = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{key} is {path}, but there is no such class ({one_line(error)}).", key) from error
    if inspect.isclass(cls):
        return check_class(cls, bases, key)
    if not (callable(cls) and is_trusted() and collections.abc.Callable in bases):
        raise UserError(f"{key}: {path} is not a class. A recipe may name functions only with {FLAG} true on the "
                        "command line, where a function is expected.", key)
    return cls


def check_class(cls: type, bases: tuple[Any, ...], key: str) -> type:
    """Return the class. Raises UserError if it is not a subclass of `bases`, or the recipe may not name it."""
    path = f"{cls.__module__}.{cls.__qualname__}"
    if not issubclass(cls, bases):
        names = " or ".join(f"{base.__module__}.{base.__name__}" for base in bases)
        raise UserError(f"{key} is {path}, but must be a subclass of {names}.", key)
    # The allowed packages have many classes, some of which run code when built: check the base class too.
    is_ours = path.partition(".")[0] in ("lmmods", "jax_engine")
    if not is_ours and not is_trusted() and not issubclass(cls, _library_bases()):
        raise UserError(f"{key}: {path} is not a callback, logger, strategy, profiler or cluster environment. If you "
                        f"trust the recipe, add {FLAG} true to the command line.", key)
    return cls


def refuse_function(key: str, path: str) -> None:
    """Raise ForeignCode for a function named by a recipe, unless the command line trusts the recipe."""
    if not is_trusted():
        raise ForeignCode(f"{key}: {path} is code that a recipe may not run. It has not run. If you have read it and "
                          f"trust it, add {FLAG} true to the command line.")


def check_recipe(model: dict[str, Any], remote_code_typed: bool) -> None:
    """Check that a model does not run code from the hub, before it is built.

    Args:
        model: Settings of the model.
        remote_code_typed: True if the command line, not a file, requests the code shipped with the model.

    Raises:
        UserError: A key requests code from the hub.
    """
    if is_trusted():
        return
    check_remote_code(model, remote_code_typed)
    for name in ("config", "config_overrides"):
        if isinstance(fields := model.get(name), dict):
            for key in ("attn_implementation", "_attn_implementation"):
                _check_kernel(f"model.{name}.{key}", fields.get(key))
    _check_kernel("model.attention", model.get("attention"))


def check_remote_code(options: Any, typed: bool = False) -> None:
    """Reject `trust_remote_code` in a recipe unless it was typed on the command line.

    Raises:
        UserError: The file sets it and the command line does not.
    """
    if options.get("trust_remote_code") and not typed and not is_trusted():
        raise UserError("model.trust_remote_code is set in a file, but a file may not run the code of "
                        f"{options.get('pretrained')}. If you have read it and trust it, add --model.trust_remote_code "
                        f"true to the command line (merge, evaluate and chat: {FLAG} true).")


def _check_kernel(key: str, name: object) -> None:
    if isinstance(name, str) and "/" in name:
        raise UserError(f"{key} is {name!r}, a kernel from the hub, which runs code. If you trust it, add "
                        f"{FLAG} true to the command line.")


def _library_bases() -> tuple[type, ...]:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins import ClusterEnvironment
    from lightning.pytorch.profilers import Profiler
    from lightning.pytorch.strategies import Strategy

    return Callback, Logger, ClusterEnvironment, Profiler, Strategy
