"""The search space of a sweep: which keys vary, and over what."""

import itertools
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import yaml

from lmmods.core.errors import UserError
from lmmods.core.recipes import RecipeLoader, guarded, read_recipe

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})((?:,(?:log|step={NUMBER}))*)")
FORMS = ("KEY=LOW..HIGH, with ,log or ,step=S behind it, or KEY=A,B,C; for example model.optimizer.lr=1e-4..1e-2,log "
         "or data.batch_size=4,8")
MOST = 10_000  # combinations of a grid
Scalar = str | int | float


@dataclass(frozen=True)
class Parameter:
    """A key that varies.

    Args:
        key: As on the command line, for example model.optimizer.lr.
        values: What it may be, each as the command line takes it; empty where it is a range.
        low: Least value of a range, a whole number where all values are.
        step: Distance of the values of a range; None where it has none.
        log: Whether a range is drawn from evenly by the logarithm.
    """

    key: str
    values: tuple[Scalar, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether a range holds whole numbers alone."""
        return all(isinstance(each, int) for each in (self.low, self.high, 1 if self.step is None else self.step))

    def extremes(self) -> tuple[Scalar, ...]:
        """The values by which a recipe is checked."""
        return self.values or (self.low, self.high)

    def grid(self) -> tuple[Scalar, ...]:
        """All values. Raises UserError: a range has no step."""
        if self.values:
            return self.values
        step = self.step or (1 if self.is_whole and not self.log else None)
        if step is None:
            raise UserError(f"{self.key} is a range without step, of which no grid can be made: give its values "
                            f"({self.key}=A,B,C) or a step ({self.key}=LOW..HIGH,step=S).")
        count = math.floor((self.high - self.low) / step * (1 + 1e-9)) + 1
        return tuple(self.low + number * step if self.is_whole else float(f"{self.low + number * step:.12g}")
                     for number in range(min(count, MOST + 1)))


def read_space(texts: list[str], file: str | None) -> list[Parameter]:
    """The parameters that a command line and a YAML file name.

    Args:
        texts: Each of the form that `FORMS` says.
        file: Of keys to a list of values, or to a mapping {low, high, log, step}.

    Raises:
        UserError: One has another form, a key stands twice, or there is none.
    """
    found = [_from_text(text) for text in texts]
    found += [_from_file(key, value, file) for key, value in (read_recipe(file) if file else {}).items()]
    if not found:
        raise UserError(f"sweep: nothing varies. Name what does as {FORMS}.")
    for one, other in itertools.combinations(found, 2):
        if one.key == other.key:
            raise UserError(f"sweep: {one.key} is given twice; keep one.")
    return found


def grid(space: list[Parameter]) -> list[dict[str, Scalar]]:
    """Every combination, the last parameter changing first. Raises UserError: a range has no step, or too many."""
    values = [parameter.grid() for parameter in space]
    if math.prod(map(len, values)) > MOST:
        raise UserError(f"The grid has more than {MOST:,} combinations. Give fewer values, or take --sampler tpe.")
    return [dict(zip((parameter.key for parameter in space), each, strict=True)) for each in itertools.product(*values)]


def as_words(values: dict[str, Scalar]) -> list[str]:
    """The options that set keys to these values, as W&B's agents write them too."""
    return [f"--{key}={value}" for key, value in values.items()]


def _from_text(text: str) -> Parameter:
    key, equals, spec = text.partition("=")
    if not (equals and spec and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key)):
        raise UserError(f"sweep: {text} names no parameter. Write {FORMS}.")
    if match := RANGE.fullmatch(spec):
        words = [word.partition("=") for word in match[3].split(",") if word]
        options = {name: _number(value) if value else True for name, _, value in words}
        return _range(key, _number(match[1]), _number(match[2]), **options)
    if re.fullmatch(r".*[\d.]\.\.[\d.].*", spec):
        raise UserError(f"sweep: {text} is no range. Write {FORMS}.")
    return Parameter(key, _texts(key, _load(f"[{spec}]", text)))


def _from_file(key: str, value: Any, file: str | None) -> Parameter:
    if isinstance(value, list) and value:
        return Parameter(key, _texts(key, value))
    numbers = isinstance(value, dict) and all(
        isinstance(each, bool) if name == "log" else isinstance(each, int | float) and not isinstance(each, bool)
        for name, each in value.items())
    if not numbers or not {"low", "high"} <= value.keys() <= {"low", "high", "log", "step"}:
        raise UserError(f"{file}: {key} must be a list of values, or a mapping of low, high and, if wanted, "
                        "log: true or step.")
    return _range(key, **value)


def _range(key: str, low: float, high: float, log: bool = False, step: float | None = None) -> Parameter:
    if not -math.inf < low < high < math.inf:
        raise UserError(f"sweep: {key} goes from {low:g} to {high:g}: the first must be the smaller one.")
    if log and low <= 0 or log and step is not None:
        raise UserError(f"sweep: {key} has log, which is for ranges above 0 without step.")
    if step is not None and not 0 < step <= high - low:
        raise UserError(f"sweep: {key} has a step of {step:g}, but must have one above 0 and within its range.")
    return Parameter(key, (), low, high, step, log)


def _number(text: str) -> float:
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def _load(values: str, text: str) -> list[Any]:
    try:
        return guarded(lambda checked: yaml.load(checked, Loader=RecipeLoader))(values)
    except yaml.YAMLError as error:
        raise UserError(f"sweep: {text} cannot be read as values. Write {FORMS}.") from error


def _texts(key: str, values: list[Any]) -> tuple[Scalar, ...]:
    """Values as the command line takes them: numbers and words as they are, others as JSON."""
    # To YAML 1.1, 1e-3 is a text.
    values = [float(value) if isinstance(value, str) and re.fullmatch(NUMBER, value) and "e" in value.lower() else value
              for value in values]
    texts = tuple(value if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)
                  for value in values)
    if len(set(map(str, texts))) < len(texts):
        raise UserError(f"sweep: {key} has a value twice; keep one.")
    return texts
