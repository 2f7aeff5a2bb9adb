"""Rewards that a recipe may name, and their options."""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from lmmods.core.errors import UserError
from lmmods.core.settings import as_yaml_word, require
from lmmods.recipe.reader import read_object

SCORER_KEYS = ("name", "function", "model")  # keys that name a reward


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Options of every reward.

    Args:
        weight: Factor of the reward in the sum; 0 only logs it.
        label: Name in metrics and files. Default: the name of the reward, the function or the model's folder.
    """

    weight: float = 1.0
    label: str | None = None

    @property
    def name(self) -> str:
        """Name in metrics and files: the label or its default."""
        return self.label if self.label is not None else self._default_name

    @property
    def _default_name(self) -> str:
        return next(name for name, cls in NAMED.items() if cls is type(self))

    def check(self, key: str) -> None:
        """Raise UserError for a value that no reward can use.

        Args:
            key: Key of the reward, for messages.
        """
        require(math.isfinite(self.weight), f"{key}.weight", self.weight, "a finite number")
        require(bool(self.name.strip()) and "/" not in self.name, f"{key}.label", repr(self.name),
                "a word without a slash")


@dataclass(frozen=True, kw_only=True)
class ComparisonReward(RewardSettings):
    """Base class for rewards that compare the answer with correct ones.

    Args:
        column: Column with the correct answer, or with a list of them; the best match counts. Default: the
            reference, the response at the end of the row.
    """

    column: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExactMatch(ComparisonReward):
    """1 if the answer equals the correct one, else 0.

    Args:
        ignore_case: Ignore case.
        strip: Ignore white space around both.
        extract: Regular expression whose first group, at its last match, is compared instead of the whole answer. An
            answer without a match is wrong. Also applied to correct answers that match.
    """

    ignore_case: bool = False
    strip: bool = True
    extract: str | None = None

    def check(self, key: str) -> None:
        super().check(key)
        if self.extract is not None:
            pattern = _compile(f"{key}.extract", self.extract)
            require(pattern is None or pattern.groups > 0, f"{key}.extract", self.extract,
                    "an expression with a group in parentheses")


@dataclass(frozen=True, kw_only=True)
class Contains(ComparisonReward):
    """1 if the answer contains the correct answer, or `text`, else 0.

    Args:
        text: String to find instead of the correct answer.
        ignore_case: Ignore case.
    """

    text: str | None = None
    ignore_case: bool = False

    def check(self, key: str) -> None:
        super().check(key)
        require(self.text is None or self.column is None, f"{key}.text", self.text, f"null where {key}.column is set",
                f"{key}.column")
        require(self.text != "", f"{key}.text", "empty", "a string that is not empty, as every answer contains that")


@dataclass(frozen=True, kw_only=True)
class Regex(RewardSettings):
    """1 if a regular expression matches, else 0.

    Args:
        pattern: Regular expression in Python's syntax; `(?i)` at its start ignores case, `(?s)` lets a dot match line
            breaks.
        full: Match the whole answer, without white space around it, instead of any part.
    """

    pattern: str
    full: bool = False

    def check(self, key: str) -> None:
        super().check(key)
        _compile(f"{key}.pattern", self.pattern)


@dataclass(frozen=True, kw_only=True)
class Format(RewardSettings):
    """1 if the answer is a sequence of tagged parts, as `<think>...</think> <answer>...</answer>`, else 0.

    Only white space may be outside them. Each tag occurs once, and none is empty.

    Args:
        tags: Tag names in order.
        opened: The prompt ends in the first opening tag, as for some reasoning models.
    """

    tags: list[str] = field(default_factory=lambda: ["think", "answer"])
    opened: bool = False

    def check(self, key: str) -> None:
        super().check(key)
        require(bool(self.tags) and all(self.tags) and len(set(self.tags)) == len(self.tags), f"{key}.tags", self.tags,
                "a list of different names")


@dataclass(frozen=True, kw_only=True)
class Length(RewardSettings):
    """0 for an answer that is short enough, -1 for one over the limit, on a line in between.

    The soft overlong punishment of DAPO (Yu et al. 2025): with `max_tokens` L and `soft_tokens` C, an answer of n
    tokens gets (L - C - n) / C from L - C on.

    Args:
        max_tokens: Maximum number of tokens; longer answers get -1.
        soft_tokens: Number of tokens below the limit over which the reward falls; 0 is a hard limit.
    """

    max_tokens: int
    soft_tokens: int = 0

    def check(self, key: str) -> None:
        super().check(key)
        require(self.max_tokens >= 1, f"{key}.max_tokens", self.max_tokens, "1 or more")
        require(0 <= self.soft_tokens <= self.max_tokens, f"{key}.soft_tokens", self.soft_tokens,
                "from 0 to max_tokens")


@dataclass(frozen=True, kw_only=True)
class F1(ComparisonReward):
    """Harmonic mean of precision and recall of the answer's words, normalised as SQuAD's evaluation does."""


@dataclass(frozen=True, kw_only=True)
class Math(ComparisonReward):
    """1 if the answer is mathematically equal to the correct one, else 0. Uses the package math-verify."""


@dataclass(frozen=True, kw_only=True)
class Code(RewardSettings):
    """1 if the program in the answer (its last fenced block, or all of it) passes its row's tests, else 0.

    Args:
        tests: Column with the tests: Python code, a list of Python tests, or strings for standard input with the
            expected output, as `{inputs: [...], outputs: [...]}` or a list of `{input, output}`.
        language: Programming language.
        timeout: Maximum time for all tests of an answer, in seconds; tests that have not run by then fail.
        partial: Reward the fraction of tests that pass.
    """

    tests: str = "tests"
    language: Literal["python"] = "python"
    timeout: float = 5.0
    partial: bool = False

    def check(self, key: str) -> None:
        super().check(key)
        require(0 < self.timeout < math.inf, f"{key}.timeout", self.timeout, "more than 0")


@dataclass(frozen=True, kw_only=True)
class Function(RewardSettings):
    """A user's own function.

    Args:
        function: Import path, for example `my.module.function`.
    """

    function: str

    @property
    def _default_name(self) -> str:
        return self.function.rpartition(".")[2]

    def check(self, key: str) -> None:
        require(bool(re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", self.function)), f"{key}.function", self.function,
                "an import path such as my.module.function")
        super().check(key)


@dataclass(frozen=True, kw_only=True)
class Model(RewardSettings):
    """The score of a reward model.

    Args:
        model: Folder of a finished Reward run, folder or hub id of a sequence classification model with one label, or
            folder of an adapter for one.
    """

    model: str

    @property
    def _default_name(self) -> str:
        return PurePath(self.model).name

    def check(self, key: str) -> None:
        require(bool(self.model.strip()), f"{key}.model", repr(self.model), "a folder or hub id of a reward model")
        super().check(key)


NAMED: dict[str, type[RewardSettings]] = {
    "exact_match": ExactMatch, "contains": Contains, "regex": Regex, "format": Format, "length": Length, "f1": F1,
    "math": Math, "code": Code}
OTHERS: dict[str, type[RewardSettings]] = {"function": Function, "model": Model}


def read_rewards(rewards: list[dict[str, Any]], key: str = "model.rewards") -> list[RewardSettings]:
    """Return the settings of the rewards. Raises UserError for a reward that does not exist, or for wrong options.

    Args:
        key: Key of the list, for messages.
    """
    by_key: dict[str, RewardSettings] = {}
    for index, settings in enumerate(rewards):
        item = f"{key}[{index}]"
        reward = read_object(_class_of(settings, item), {
            name: value for name, value in settings.items() if name != "name" and (
                name not in SCORER_KEYS or value is not None)}, item)
        if reward is None:
            continue
        reward.check(item)
        if same := next((other for other, earlier in by_key.items() if earlier.name == reward.name), None):
            raise UserError(f"{item} and {same} have the same name, {reward.name}. Set the label of one of them.", item)
        by_key[item] = reward
    return list(by_key.values())


def columns_of(rewards: Sequence[RewardSettings], has_environment: bool = False) -> tuple[str, ...] | None:
    """Return the columns of a row that rewards read; None if the user's code may read any.

    Args:
        has_environment: Answers have an environment, which reads the row too.
    """
    if has_environment or any(isinstance(reward, Function) for reward in rewards):
        return None
    names = (getattr(reward, "tests", None) or getattr(reward, "column", None) for reward in rewards)
    return tuple(sorted({name for name in names if name is not None}))


def _class_of(settings: Any, key: str) -> type[RewardSettings]:
    """Return the class of the reward that a mapping names. Raises UserError if it does not name one."""
    if not isinstance(settings, dict):
        raise UserError(f"{key} is {as_yaml_word(settings)}, but must be a mapping such as {{name: exact_match}}.", key)
    keys = [name for name in SCORER_KEYS if settings.get(name) is not None]
    if len(keys) != 1:
        problem = f"has {' and '.join(keys)}" if keys else "is incomplete"
        raise UserError(f"{key} {problem}, but must have one of {', '.join(SCORER_KEYS)}: {{name: exact_match}}, "
                        "{function: my.module.function} or {model: runs/reward}.", key)
    name = settings["name"] if keys == ["name"] else None
    if name is not None and not (isinstance(name, str) and name in NAMED):
        raise UserError(f"{key}.name is {name}, but must be one of {', '.join(NAMED)}."
                        + did_you_mean(name, list(NAMED)), f"{key}.name")
    return OTHERS[keys[0]] if name is None else NAMED[name]


def did_you_mean(name: object, names: list[str]) -> str:
    """Return the end of a message that suggests the most similar of `names`; "" if none is similar."""
    near = difflib.get_close_matches(str(name), names, 1)
    return f" Did you mean {near[0]}?" if near else ""


def _compile(key: str, text: str) -> re.Pattern[str] | None:
    """Compile a regular expression. Raises UserError if it is not valid."""
    try:
        return re.compile(text)
    except re.error as error:
        require(False, key, text, f"a regular expression: {error}")
        return None
