"""Recipe files: read within limits; mistakes are reported with file and line before anything is built from them.

PyYAML's safe loader runs no code, but it expands aliases without limit, recurses until the stack overflows, silently
uses the second of two equal keys, and fails on some values with exceptions that are not its own. So a text is first
checked event by event, without building anything.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

try:
    from yaml import CSafeLoader as Loader
except ImportError:  # without libyaml
    from yaml import SafeLoader as Loader

from lmmods.core import files
from lmmods.core.errors import UserError

MAX_BYTES = 10 * 2**20
MAX_NODES = 100_000  # values after expanding aliases; the largest shipped recipe has about 100
MAX_DEPTH = 64
MAX_DIGITS = 400  # no float has more
TRUST_KEY = "trust_recipe_code"
CONFIG_OPTIONS = ("--config", "-c")


class RecipeLoader(Loader):
    """YAML's safe loader without dates, which no key takes: `2024-13-45` is a string."""

    yaml_implicit_resolvers = {first: [(tag, pattern) for tag, pattern in resolvers
                                       if tag != "tag:yaml.org,2002:timestamp"]
                               for first, resolvers in Loader.yaml_implicit_resolvers.items()}


# A subclass of str, so that keys of a mapping compare and hash by their text.
class Scalar(str):
    """A value or key with its original text in a recipe.

    Attributes:
        yaml_value: Its value in YAML.
        line: Its line in the file.
        is_text: True if the text itself is the value, as in `revision: 1234567`.
    """

    yaml_value: Any
    line: int
    is_text = False

    @classmethod
    def of(cls, text: str, yaml_value: Any, line: int = 1) -> "Scalar":
        """Return a scalar with these attributes."""
        scalar = cls(text)
        scalar.yaml_value, scalar.line = yaml_value, line
        return scalar


class ScalarLoader(RecipeLoader):
    """RecipeLoader whose keys and values are `Scalar`; `1e-4` is a number, as in YAML 1.2."""

    yaml_implicit_resolvers = {first: [(tag, pattern) for tag, pattern in resolvers
                                       if tag != "tag:yaml.org,2002:float"]
                               for first, resolvers in RecipeLoader.yaml_implicit_resolvers.items()}


def _make_constructor(name: str) -> Callable[[Any, yaml.ScalarNode], Scalar]:
    construct = yaml.constructor.SafeConstructor.yaml_constructors[f"tag:yaml.org,2002:{name}"]
    return lambda loader, node: Scalar.of(node.value, construct(loader, node), node.start_mark.line + 1)


# Every scalar keeps its text next to the value that YAML gives it.
for _kind in ("null", "bool", "int", "float", "str"):
    ScalarLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _make_constructor(_kind))
# PyYAML's pattern of floats, except that the dot and the sign of an exponent are optional.
ScalarLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9_]+(?:[eE][-+][0-9]+)?
    |[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""", re.X),
    list("-+0123456789."))


class RecipeDumper(yaml.SafeDumper):
    """YAML's safe dumper, but strings that other readers take for numbers are quoted: `1e5`, a commit `12345e67`."""


RecipeDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


class BrokenRecipe(yaml.YAMLError):
    """Invalid recipe; the message has the line and the reason."""


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a recipe file.

    Raises:
        UserError: The file is missing, unreadable, or not a recipe.
    """
    return _mapping(read_text(path), str(path))


def as_yaml(content: Any, **style: Any) -> str:
    """Dump values so that this module, YAML 1.1 and 1.2 read them back unchanged; `style` as in yaml.dump."""
    return yaml.dump(content, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, **style)


def config_argument(value: str) -> dict[str, Any]:
    """Read the argument of `--config`: the path of a recipe file, or an inline recipe.

    Raises:
        UserError: It is neither.
    """
    _check_config_value(value)
    # An inline recipe has a brace, a second line or a `key: value`; an existing file takes precedence.
    return _mapping(value, "--config") if is_inline(value) else read_recipe(value)


def read_with_lines(value: str) -> dict[str, Any]:
    """Like `config_argument`, with `Scalar` keys and values."""
    _check_config_value(value)
    inline = is_inline(value)
    return _mapping(value if inline else read_text(value), "--config" if inline else value, ScalarLoader)


def is_inline(value: str) -> bool:
    """Return True if the argument of `--config` is an inline recipe, not the path of a file."""
    return bool(re.search(r"[{\n]|:\s", value)) and not _path_exists(value)


def _check_config_value(value: str) -> None:
    if not value.strip() or value.startswith("--"):  # missing, or the next option
        raise UserError("--config has no value. Add a recipe, for example --config configs/sft_qlora.yaml; "
                        "python train.py recipes lists the shipped ones.")


def read_value(text: str) -> Any:
    """Parse a value to `Scalar`; text that is not YAML is a string."""
    try:
        value = guard(lambda checked: yaml.load(checked, Loader=ScalarLoader))(str(text))
    except yaml.YAMLError:
        return Scalar.of(text, text)
    # The text as typed, since YAML would drop quotes, comments and spaces around it.
    return value if isinstance(value, dict | list) else Scalar.of(text, text if value is None else value.yaml_value)


def plain(value: Any) -> Any:
    """Convert a recipe of `Scalar` keys and values to plain values."""
    if isinstance(value, Scalar):
        return str(value) if value.is_text else value.yaml_value
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def option_values(arguments: list[str], *names: str) -> list[str]:
    """Return the values of an option, which may have several names, on a command line; "" for a missing value."""
    values = []
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name in names:
            values.append(value if equals else following)
    return values


def with_shipped_recipes(arguments: list[str]) -> list[str]:
    """Replace names of shipped recipes in the arguments of `--config` by their paths."""
    words: list[str] = []
    for word in arguments:
        name, equals, value = word.partition("=")
        # The word after --config.
        if words and words[-1] in CONFIG_OPTIONS:
            word = as_file(word)
        elif name in CONFIG_OPTIONS and equals:
            word = f"{name}={as_file(value)}"
        words.append(word)
    return words


def read_text(path: str | Path) -> str:
    """Return the text of a regular UTF-8 file.

    Raises:
        UserError: It is missing, too large, not UTF-8, or a folder, a pipe or a device.
    """
    shown = repr(str(path)) if "\0" in str(path) else shorten(str(path))
    try:
        content = files.read_bytes(path, MAX_BYTES)
    except files.NotRegular as error:
        raise UserError(f"--config {shown}: a recipe must be a regular file, not a folder, a pipe or a device."
                        ) from error
    except files.TooLarge as error:
        raise UserError(f"--config {shown}: larger than {MAX_BYTES // 2**20} MiB, so it is not a recipe. Use another "
                        "file.") from error
    except FileNotFoundError as error:
        raise UserError(f"--config {shown}: no such file in {Path.cwd()}, and no shipped recipe of this name. Use one "
                        "that python train.py recipes lists.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"--config {shown}: cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{shown}: the file is UTF-16, but a recipe must be UTF-8. Convert it: iconv -f UTF-16 -t "
                        "UTF-8.")
    try:
        # With or without a byte order mark.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{shown}:{line}: byte {content[error.start]:#04x} is not UTF-8. Convert the recipe, for "
                        "example with iconv -f LATIN1 -t UTF-8.") from error


def shorten(text: str, limit: int = 100) -> str:
    """Shorten a value for messages."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def guard(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a YAML loader so that a text is checked before it is loaded."""

    def load_checked(text: str) -> Any:
        # Before `load`, which would expand aliases and recurse without limit.
        check(text)
        try:
            return load(text)
        except ValueError as error:  # 0b_, for example, looks like a number
            raise BrokenRecipe(str(error)) from error

    return load_checked


def _mapping(text: str, name: str, loader: type = RecipeLoader) -> dict[str, Any]:
    try:
        content = guard(lambda checked: yaml.load(checked, Loader=loader))(text)
    except BrokenRecipe as error:
        raise UserError(f"{name}: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{name}: broken YAML: {_format_yaml_error(error)}") from error
    if not isinstance(content, dict):
        kind = {list: "a list", type(None): "empty"}.get(type(plain(content)), "a single value")
        raise UserError(f"{name}: a recipe must be a mapping of keys to values, but this is {kind}.")
    return content


def _path_exists(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):
        return False


def _format_yaml_error(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    text = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"line {mark.line + 1}: {text}" if mark else shorten(text, 200)


# The check before loading --------------------------------------------------------------------------------------------


@dataclass
class _Collection:
    """A mapping or list whose end has not been reached."""

    anchor: str | None
    is_mapping: bool
    size: int = 1
    children: int = 0
    keys: set[str] = field(default_factory=set)


def check(text: str) -> None:
    """Check a YAML text without building anything.

    Raises:
        BrokenRecipe: It is nested too deeply or, with aliases expanded, too large; a mapping has a duplicate key; a
            value has a tag or too many digits; or it contains the key that only the command line may set.
        yaml.YAMLError: It is not YAML.
    """
    try:
        _check_events(yaml.parse(text, Loader=Loader))
    except yaml.YAMLError:
        # libyaml may hit its own limit of nesting while it looks ahead for the end of a key.
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _check_events(yaml.parse(text, Loader=yaml.SafeLoader))
        raise


def _check_events(events: Iterable[yaml.Event]) -> None:
    # Number of values under each anchor, with aliases expanded; and the collections that are open at this event.
    anchors: dict[str, int] = {}
    open_collections: list[_Collection] = []
    for event in events:
        line = f"line {event.start_mark.line + 1}"
        # "!" is the non-specific tag, which constructs nothing of its own.
        if isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent) and event.tag not in (None, "!"):
            raise BrokenRecipe(f"{line}: the tag {shorten(event.tag)} is not allowed in a recipe. Write the "
                               "value without it.")
        if isinstance(event, yaml.CollectionStartEvent):
            open_collections.append(_Collection(event.anchor, isinstance(event, yaml.MappingStartEvent)))
            if len(open_collections) > MAX_DEPTH:
                raise BrokenRecipe(f"{line}: more than {MAX_DEPTH} levels of nesting. Use fewer.")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            done = open_collections.pop()
            size, anchor = done.size, done.anchor
        elif isinstance(event, yaml.ScalarEvent):
            size, anchor = 1, event.anchor
            _check_scalar(event, open_collections, line)
        elif isinstance(event, yaml.AliasEvent):
            # Anchors are entered at their end, so a collection cannot contain itself.
            if event.anchor not in anchors:
                raise BrokenRecipe(f"{line}: the alias *{event.anchor} has no complete anchor &{event.anchor} "
                                   "before it.")
            size, anchor = anchors[event.anchor], None
        else:
            continue
        if anchor is not None:
            anchors[anchor] = size
        if open_collections:
            # Sizes add up towards the root, so an alias of aliases is counted in full without being expanded.
            open_collections[-1].size += size
            open_collections[-1].children += 1
            if open_collections[-1].size > MAX_NODES:
                raise BrokenRecipe(f"{line}: more than {MAX_NODES:,} values, with aliases expanded. Remove some.")


def _check_scalar(event: yaml.ScalarEvent, open_collections: list[_Collection], line: str) -> None:
    # Conversion to an integer takes quadratic time. Quoted digits (not implicit) are a string.
    if len(event.value) > MAX_DIGITS and re.fullmatch(r"[-+]?[0-9_]+", event.value) and event.implicit[0]:
        raise BrokenRecipe(f"{line}: a number of {len(event.value)} digits. Use at most {MAX_DIGITS}.")
    # Children of a mapping alternate: a key, its value, ...
    parent = open_collections[-1] if open_collections else None
    if parent is None or not parent.is_mapping or parent.children % 2:
        return
    if event.value in parent.keys:
        raise BrokenRecipe(f"{line}: the key {shorten(event.value)} occurs twice in one mapping; keep one.")
    if event.value == TRUST_KEY:
        raise BrokenRecipe(f"{line}: trust_recipe_code is allowed on the command line only. Remove it from the file.")
    parent.keys.add(event.value)


# ---------------------------------------------------------------------------------------------------------------------
# Shipped recipes: their location, and the comment at the top of each.

PACKAGE = Path(__file__).parents[1]
# Paths of the demo's files in recipes; these files exist in a clone only.
DEMO = re.compile(r"demo/(llama|bert|corpus|squad|instructions|mmlu)\b")


@dataclass(frozen=True)
class Header:
    """The comment at the top of a recipe.

    Args:
        hardware: Hardware that it needs.
        time: Duration on that hardware.
    """

    hardware: str
    time: str


def recipe_folder() -> Path:
    """Return the folder `configs`: inside the installed package, or in a clone."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def shipped_recipes() -> dict[str, Path]:
    """Return all shipped recipes by name; recipes for the demo's files come first."""
    folder = recipe_folder()
    return {path.stem: path for path in [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("recipes/*.yaml"))]}


def header_of(path: Path) -> Header:
    """Parse the comment at the top of a recipe. Raises UserError if a part of it is missing."""
    comment = "".join(re.findall(r"\A(?:#.*\n)*", path.read_text(encoding="utf-8")))
    parts = {}
    for name in ("hardware", "time"):
        match = re.search(rf"^# {name.capitalize()}: (.+)$", comment, re.M)
        if match is None:
            raise UserError(f"{path}: the comment at its top has no {name}. Add it, as in configs/clm.yaml.")
        parts[name] = match[1]
    return Header(**parts)


def as_file(value: str) -> str:
    """Replace the name of a shipped recipe by its path; an existing file of that name takes precedence."""
    for name, path in shipped_recipes().items():
        if value in (name, str(path.relative_to(recipe_folder().parent))) and not Path(value).exists():
            return str(path)
    return value
