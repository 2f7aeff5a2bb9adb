"""Score answers with the named rewards, in the processes of `reward_processes`."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lmmods.core.text_metrics import normalize_answer, token_f1
from lmmods.recipe.rewards import (
    F1,
    Code,
    ComparisonReward,
    Contains,
    ExactMatch,
    Format,
    Length,
    Math,
    Regex,
    RewardSettings,
)
from lmmods.rollouts.code_tests import run_tests


class Unscorable(Exception):
    """An answer cannot get a reward; the message is the reason."""


class Text(NamedTuple):
    """Inputs of a named reward for one answer.

    Args:
        text: The answer.
        num_tokens: Its length in tokens.
        expected: What the row provides for this reward: right answers as strings, or tests of a program.
    """

    text: str
    num_tokens: int
    expected: Any = None


@dataclass(frozen=True)
class NamedScorer:
    """Loads the function of a named reward in the process that calls it."""

    settings: RewardSettings

    def load(self) -> Callable[[list[Text]], list[float]]:
        """Return a function that scores answers."""
        score = partial(SCORES[type(self.settings)], self.settings)
        return lambda answers: [score(answer) for answer in answers]


def read_expected(settings: RewardSettings, row: dict[str, Any], reference: str | None) -> Any:
    """Return what a reward needs from an answer's row. Raises Unscorable if it is missing or has a wrong type."""
    if isinstance(settings, Code):
        return _read_column(row, settings.tests)
    if isinstance(settings, Contains) and settings.text is not None:
        return [settings.text]
    if not isinstance(settings, ComparisonReward):
        return None
    if settings.column is None and reference is None:
        raise Unscorable("the row has no reference answer")
    name = "the reference" if settings.column is None else f"column {settings.column}"
    content = reference if settings.column is None else _read_column(row, settings.column)
    values = content if isinstance(content, list | tuple) else [content]
    # By type, as isinstance takes true for a number.
    if not values or not all(type(value) in (str, int, float) for value in values):
        raise Unscorable(f"{name} is {type(content).__name__ if values else 'an empty list'}, but must be a string, "
                         "a number or a list of these")
    return [str(value) for value in values]


def _read_column(row: dict[str, Any], name: str) -> Any:
    if row.get(name) is None:
        raise Unscorable(f"the row has no column {name}" if name not in row else f"column {name} is empty")
    return row[name]


def score_exact_match(settings: ExactMatch, answer: Text) -> float:
    """Return 1 if the answer equals one of the right answers, otherwise 0."""
    text = answer.text
    if settings.extract is not None:
        text = _extract(settings.extract, text)
        if text is None:
            return 0.0

    def normalise(text: str) -> str:
        text = text.strip() if settings.strip else text
        return text.casefold() if settings.ignore_case else text

    def extract_right(text: str) -> str:
        extracted = _extract(settings.extract, text) if settings.extract is not None else None
        return text if extracted is None else extracted

    return float(normalise(text) in {normalise(extract_right(right_answer)) for right_answer in answer.expected})


def _extract(pattern: str, text: str) -> str | None:
    """Return the first group of the last match, empty if the group is unmatched; None if there is no match."""
    matches = list(re.finditer(pattern, text))
    return matches[-1][1] or "" if matches else None


def score_contains(settings: Contains, answer: Text) -> float:
    """Return 1 if one of the strings occurs in the answer, otherwise 0."""
    if settings.text is None and not all(candidate.strip() for candidate in answer.expected):
        raise Unscorable("the right answer is empty, so it would occur in every answer")
    text, expected = answer.text, answer.expected
    if settings.ignore_case:
        text, expected = text.casefold(), [candidate.casefold() for candidate in expected]
    return float(any(candidate in text for candidate in expected))


def score_regex(settings: Regex, answer: Text) -> float:
    """Return 1 if the regular expression matches the answer, otherwise 0."""
    if settings.full:
        return float(re.fullmatch(settings.pattern, answer.text.strip()) is not None)
    return float(re.search(settings.pattern, answer.text) is not None)


def score_format(settings: Format, answer: Text) -> float:
    """Return 1 if the answer is a sequence of tagged parts, none of them empty, otherwise 0."""
    text = f"<{settings.tags[0]}>{answer.text}" if settings.opened else answer.text
    if any(text.count(f"<{slash}{tag}>") != 1 for tag in settings.tags for slash in ("", "/")):
        return 0.0
    pattern = r"\s*".join(f"<{re.escape(tag)}>(.*)</{re.escape(tag)}>" for tag in settings.tags)
    match = re.fullmatch(pattern, text.strip(), re.DOTALL)
    return float(match is not None and all(part.strip() for part in match.groups()))


def score_length(settings: Length, answer: Text) -> float:
    """Return the soft overlong punishment, -1 to 0 (DAPO, equation 13)."""
    excess = answer.num_tokens - (settings.max_tokens - settings.soft_tokens)
    if excess <= 0:
        return 0.0
    return -min(excess / settings.soft_tokens, 1.0) if settings.soft_tokens else -1.0


def score_f1(settings: F1, answer: Text) -> float:
    """Return the highest F1 of words over the right answers."""
    # Without the words that do not count, a right answer such as "A" would equal an empty answer.
    candidates = [text for text in answer.expected if normalize_answer(text) or not text.strip()]
    if not candidates:
        raise Unscorable(f"the right answer {answer.expected[0]!r} has only articles and punctuation, which do "
                         "not count")
    return max(token_f1(answer.text, text) for text in candidates)


def score_math(settings: Math, answer: Text) -> float:
    """Return 1 if math-verify finds the answer equal to one of the right answers, otherwise 0.

    Its own time limits, which use signals, are off: the process that calls this is killed when it takes too long.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # silences the warning that its time limits are off
    parsed = parse(answer.text, [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
                   parsing_timeout=None)
    right_answers = [parse(_delimit_formula(text), parsing_timeout=None) for text in answer.expected]
    if not all(right_answers):
        unreadable = answer.expected[right_answers.index([])]
        raise Unscorable(f"the right answer {unreadable!r} is not a mathematical expression")
    return float(any(verify(right, parsed, timeout_seconds=None) for right in right_answers))


def _delimit_formula(text: str) -> str:
    """Put dollar signs around a formula that has no LaTeX delimiters."""
    return text if re.search(r"\$|\\boxed|\\\(|\\\[", text) else f"${text}$"


def score_code(settings: Code, answer: Text) -> float:
    """Return the fraction of the tests that the program passes; without `partial`, 1 if it passes all, otherwise 0."""
    try:
        fraction = LANGUAGES[settings.language](answer.text, answer.expected, settings.timeout, settings.partial)
    except ValueError as error:
        raise Unscorable(f"column {settings.tests}: {error}") from error
    return fraction if settings.partial else float(fraction == 1)


LANGUAGES = {"python": run_tests}
SCORES: dict[type[RewardSettings], Callable[[Any, Text], float]] = {
    ExactMatch: score_exact_match, Contains: score_contains, Regex: score_regex, Format: score_format,
    Length: score_length, F1: score_f1, Math: score_math, Code: score_code}
