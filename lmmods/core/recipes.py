"""Recipe files: read within limits; mistakes are reported with file and line before anything is built from them.

PyYAML's safe loader runs no code, but it expands aliases without limit, recurses until the stack overflows, silently
takes the second of two equal keys, and fails on some values with exceptions that are not its own. So a text is first
checked event by event, without building anything.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from lmmods.core import files
from lmmods.core.errors import UserError

MAX_BYTES = 10 * 2**20
MAX_NODES = 100_000  # values, counted after aliases are put in; the largest recipe shipped has about 100
MAX_DEPTH = 64
MAX_DIGITS = 400  # no float has more
TRUST_KEY = "trust_recipe_code"
CONFIG_OPTIONS = ("--config", "-c")

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class RecipeLoader(Loader):
    """YAML's safe loader without dates, which no key takes: `2024-13-45` is a text."""

    yaml_implicit_resolvers = {first: [(tag, pattern) for tag, pattern in resolvers
                                       if tag != "tag:yaml.org,2002:timestamp"]
                               for first, resolvers in Loader.yaml_implicit_resolvers.items()}


class Written(str):
    """The text of a value or key as it stands in a recipe.

    `reads_as` is what YAML makes of it, `line` where it stands. `is_meant` says that the text itself is the value, as
    in `revision: 1234567`.
    """

    reads_as: Any
    line: int
    is_meant = False

    @classmethod
    def of(cls, text: str, reads_as: Any, line: int = 1) -> "Written":
        made = cls(text)
        made.reads_as, made.line = reads_as, line
        return made


class WrittenLoader(RecipeLoader):
    """The same loader, whose keys and values are `Written`; `1e-4` reads as a number, as in YAML 1.2."""

    yaml_implicit_resolvers = {first: [(tag, pattern) for tag, pattern in resolvers
                                       if tag != "tag:yaml.org,2002:float"]
                               for first, resolvers in RecipeLoader.yaml_implicit_resolvers.items()}


def _constructor(kind: str) -> Callable[[Any, yaml.ScalarNode], Written]:
    plain = yaml.constructor.SafeConstructor.yaml_constructors[f"tag:yaml.org,2002:{kind}"]
    return lambda loader, node: Written.of(node.value, plain(loader, node), node.start_mark.line + 1)


for _kind in ("null", "bool", "int", "float", "str"):
    WrittenLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _constructor(_kind))
WrittenLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9_]+(?:[eE][-+][0-9]+)?
    |[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""", re.X),
    list("-+0123456789."))


class RecipeDumper(yaml.SafeDumper):
    """YAML's safe dumper, which quotes a text that others take for a number: `1e5`, 12345e67 of an id or a commit."""


RecipeDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


class BrokenRecipe(yaml.YAMLError):
    """Not a valid recipe; the message says where and why."""


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The mapping that a recipe file holds.

    Raises:
        UserError: No such file, none that can be read, or none that holds a recipe.
    """
    return _mapping(read_text(path), str(path))


def as_yaml(content: Any, **style: Any) -> str:
    """Plain values as text that reads back as they are, here, in YAML 1.2 and by jsonargparse; `style` of yaml.dump."""
    return yaml.dump(content, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, **style)


def config_argument(value: str) -> dict[str, Any]:
    """What `--config` is given: the path of a recipe file, or a recipe written out. Raises UserError: neither."""
    if not value.strip() or value.startswith("--"):  # nothing, or what follows is the next option
        raise UserError("--config has no value. Give it a recipe, as in --config configs/sft_qlora.yaml; "
                        "python train.py recipes lists those that come with the project.")
    if re.search(r"[{\n]|:\s", value) and not _exists(value):
        return _mapping(value, "--config")
    return read_recipe(value)


def read_written(value: str) -> dict[Written, Any]:
    """As `config_argument`, of `Written` keys and values."""
    is_text = re.search(r"[{\n]|:\s", value) and not _exists(value)
    return _mapping(value if is_text else read_text(value), "--config" if is_text else value, WrittenLoader)


def read_value(text: str) -> Any:
    """What a text is as the value of a key, of `Written`; a text that is no YAML is itself."""
    try:
        value = guarded(lambda checked: yaml.load(checked, Loader=WrittenLoader))(str(text))
    except yaml.YAMLError:
        return Written.of(text, text)
    return value if isinstance(value, dict | list) else Written.of(text, text if value is None else value.reads_as)


def plain(written: Any) -> Any:
    """What a recipe of `Written` keys and values means."""
    if isinstance(written, Written):
        return str(written) if written.is_meant else written.reads_as
    if isinstance(written, dict):
        return {plain(key): plain(value) for key, value in written.items()}
    return [plain(each) for each in written] if isinstance(written, list) else written


def option_values(arguments: list[str], *names: str) -> list[str]:
    """What a command line gives to an option, which may have several names; "" where the value is missing."""
    found = []
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name in names:
            found.append(value if equals else following)
    return found


def with_shipped_recipes(arguments: list[str]) -> list[str]:
    """The command line with paths in place of the names of shipped recipes, wherever it gives one to `--config`."""
    found: list[str] = []
    for word in arguments:
        name, equals, value = word.partition("=")
        if found and found[-1] in CONFIG_OPTIONS:
            word = as_file(word)
        elif name in CONFIG_OPTIONS and equals:
            word = f"{name}={as_file(value)}"
        found.append(word)
    return found


def may_overwrite(arguments: list[str], folder: str | None) -> bool:
    """Whether `fit` may start over in a run folder: a command line says so for any, a file for the one it names."""
    if typed := option_values(arguments, "--overwrite"):
        return typed[-1].lower() == "true"
    overwrites = False
    for value in option_values(arguments, *CONFIG_OPTIONS):
        content = config_argument(value)
        if "overwrite" in content:
            trainer = content.get("trainer")
            named = trainer.get("default_root_dir") if isinstance(trainer, dict) else None
            overwrites = content["overwrite"] is True and named is not None and named == folder
    return overwrites


def read_text(path: str | Path) -> str:
    """Text of a regular file in UTF-8.

    Raises:
        UserError: There is none; it is a folder, a pipe or a device; it is too large; or it is not UTF-8.
    """
    shown = repr(str(path)) if "\0" in str(path) else shortened(str(path))
    try:
        content = files.read_bytes(path, MAX_BYTES)
    except files.NotRegular as error:
        raise UserError(f"--config {shown}: a recipe must be a regular file, not a folder, a pipe or a device."
                        ) from error
    except files.TooLarge as error:
        raise UserError(f"--config {shown}: more than {MAX_BYTES // 2**20} MiB are no recipe.") from error
    except FileNotFoundError as error:
        raise UserError(f"--config {shown}: no such file in {Path.cwd()}, and no recipe of this name among those that "
                        "python train.py recipes lists.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"--config {shown}: cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{shown}: the file is UTF-16, but a recipe must be UTF-8: iconv -f UTF-16 -t UTF-8.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{shown}:{line}: byte {content[error.start]:#04x} is not UTF-8. Convert the recipe, for "
                        "example with iconv -f LATIN1 -t UTF-8.") from error


def shortened(text: str, limit: int = 100) -> str:
    """A value as a message shows it."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def guarded(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """A YAML loader that checks a text before it reads it."""

    def load_checked(text: str) -> Any:
        check(text)
        try:
            return load(text)
        except ValueError as error:  # 0b_, for example, looks like a number
            raise BrokenRecipe(str(error)) from error

    return load_checked


def _mapping(text: str, name: str, loader: type = RecipeLoader) -> dict[str, Any]:
    try:
        content = guarded(lambda checked: yaml.load(checked, Loader=loader))(text)
    except BrokenRecipe as error:
        raise UserError(f"{name}: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{name}: broken YAML: {_reason(error)}") from error
    if not isinstance(content, dict):
        kind = {list: "a list", type(None): "nothing"}.get(type(plain(content)), "a single value")
        raise UserError(f"{name}: a recipe must be a mapping of keys to values, but this holds {kind}.")
    return content


def _exists(value: str) -> bool:
    try:
        return Path(value).exists()
    except (OSError, ValueError):
        return False


def _reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    text = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"line {mark.line + 1}: {text}" if mark else shortened(text, 200)


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
        BrokenRecipe: It is too deep or, with its aliases put in, too large; a mapping has a key twice; a value has a
            tag, or more digits than any number; or it contains the key that is for the command line only.
        yaml.YAMLError: It is not YAML.
    """
    try:
        _check_events(yaml.parse(text, Loader=Loader))
    except yaml.YAMLError:
        # libyaml may have a limit of nesting of its own, which it meets while it looks ahead for the end of a key.
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _check_events(yaml.parse(text, Loader=yaml.SafeLoader))
        raise


def _check_events(events: Iterable[yaml.Event]) -> None:
    anchors: dict[str, int] = {}
    open_ones: list[_Collection] = []
    for event in events:
        where = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent) and event.tag not in (None, "!"):
            raise BrokenRecipe(f"{where}: the tag {shortened(event.tag)} has no place in a recipe; write the value "
                               "plainly.")
        if isinstance(event, yaml.CollectionStartEvent):
            open_ones.append(_Collection(event.anchor, isinstance(event, yaml.MappingStartEvent)))
            if len(open_ones) > MAX_DEPTH:
                raise BrokenRecipe(f"{where}: more levels of nesting than {MAX_DEPTH}.")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            done = open_ones.pop()
            size, anchor = done.size, done.anchor
        elif isinstance(event, yaml.ScalarEvent):
            size, anchor = 1, event.anchor
            _check_scalar(event, open_ones, where)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise BrokenRecipe(f"{where}: *{event.anchor} repeats nothing that stands complete before it.")
            size, anchor = anchors[event.anchor], None
        else:
            continue
        if anchor is not None:
            anchors[anchor] = size
        if open_ones:
            open_ones[-1].size += size
            open_ones[-1].children += 1
            if open_ones[-1].size > MAX_NODES:
                raise BrokenRecipe(f"{where}: more values than {MAX_NODES:,}, aliases counted as what they stand for.")


def _check_scalar(event: yaml.ScalarEvent, open_ones: list[_Collection], where: str) -> None:
    if len(event.value) > MAX_DIGITS and re.fullmatch(r"[-+]?[0-9_]+", event.value) and event.implicit[0]:
        raise BrokenRecipe(f"{where}: a number of {len(event.value)} digits.")
    parent = open_ones[-1] if open_ones else None
    if parent is None or not parent.is_mapping or parent.children % 2:
        return
    if event.value in parent.keys:
        raise BrokenRecipe(f"{where}: the key {shortened(event.value)} stands twice in one mapping; keep one.")
    if event.value == TRUST_KEY:
        raise BrokenRecipe(f"{where}: trust_recipe_code counts on the command line only, never in a file.")
    parent.keys.add(event.value)


# ---------------------------------------------------------------------------------------------------------------------
# The recipes that come with the project: where they lie, and what the comment at the top of each says.

PACKAGE = Path(__file__).parents[1]
# What recipes name of the demo's files, which are in a clone only.
DEMO = re.compile(r"demo/(llama|bert|corpus|squad|instructions|mmlu)\b")


@dataclass(frozen=True)
class Header:
    """What the comment at the top of a recipe says.

    Args:
        hardware: What it needs.
        time: How long it takes there.
    """

    hardware: str
    time: str


def recipe_folder() -> Path:
    """`configs`: inside of the installed package, or of a clone."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def shipped_recipes() -> dict[str, Path]:
    """Every recipe by its name, those on the demo's files first."""
    folder = recipe_folder()
    return {path.stem: path for path in [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("recipes/*.yaml"))]}


def header_of(path: Path) -> Header:
    """The comment at the top of a recipe. Raises UserError where a part of it is missing."""
    comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))[0]
    found = {name: re.search(rf"^# {name.capitalize()}: (.+)$", comment, re.M) for name in ("hardware", "time")}
    if missing := [name for name, match in found.items() if match is None]:
        raise UserError(f"{path}: the comment at its top does not say the {missing[0]}, as that of configs/clm.yaml "
                        "does.")
    return Header(**{name: match[1] for name, match in found.items()})


def as_file(value: str) -> str:
    """What `--config` is given, with the path of a shipped recipe in place of its name. A file of that name goes
    before it."""
    for name, path in shipped_recipes().items():
        if value in (name, str(path.relative_to(recipe_folder().parent))) and not Path(value).exists():
            return str(path)
    return value
