"""Rewards that a recipe names, as functions of an answer; they run in the processes of `reward_processes`."""

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
    Compared,
    Contains,
    ExactMatch,
    Format,
    Length,
    Math,
    Regex,
    RewardSettings,
)
from lmmods.rollouts.code_tests import share_passed


class Unscorable(Exception):
    """An answer that has no reward; the message is the reason."""


class Text(NamedTuple):
    """What named rewards see of an answer.

    Args:
        text: The answer.
        num_tokens: Its length in tokens.
        wanted: What its row holds for this reward: right answers as texts, or tests of a program.
    """

    text: str
    num_tokens: int
    wanted: Any = None


@dataclass(frozen=True)
class NamedScorer:
    """Loads the function of a named reward, in the process that calls it."""

    settings: RewardSettings

    def load(self) -> Callable[[list[Text]], list[float]]:
        """Return a function that scores answers."""
        score = partial(SCORES[type(self.settings)], self.settings)
        return lambda answers: [score(answer) for answer in answers]


def wanted_by(settings: RewardSettings, row: dict[str, Any], reference: str | None) -> Any:
    """Return what a reward needs of the row of an answer. Raises Unscorable: it is missing, or of no use."""
    if isinstance(settings, Code):
        return _column(row, settings.tests)
    if isinstance(settings, Contains) and settings.text is not None:
        return [settings.text]
    if not isinstance(settings, Compared):
        return None
    if settings.column is None and reference is None:
        raise Unscorable("the row has no reference answer")
    name = "the reference" if settings.column is None else f"column {settings.column}"
    found = reference if settings.column is None else _column(row, settings.column)
    values = found if isinstance(found, list | tuple) else [found]
    # By type, not isinstance: true is no number.
    if not values or not all(type(value) in (str, int, float) for value in values):
        raise Unscorable(f"{name} is {type(found).__name__ if values else 'an empty list'}, but must be a text, a "
                         "number or a list of these")
    return [str(value) for value in values]


def _column(row: dict[str, Any], name: str) -> Any:
    if row.get(name) is None:
        raise Unscorable(f"the row has no column {name}" if name not in row else f"column {name} is empty")
    return row[name]


def exact_match(settings: ExactMatch, answer: Text) -> float:
    """1 if the answer equals one of the right ones."""
    text = answer.text
    if settings.extract is not None:
        text = _extract(settings.extract, text)
        if text is None:
            return 0.0

    def normalised(text: str) -> str:
        text = text.strip() if settings.strip else text
        return text.casefold() if settings.ignore_case else text

    def right(text: str) -> str:
        found = _extract(settings.extract, text) if settings.extract is not None else None
        return text if found is None else found

    return float(normalised(text) in {normalised(right(each)) for each in answer.wanted})


def _extract(pattern: str, text: str) -> str | None:
    """Return the first group of the last match; None if there is no match. A group that took no part is empty."""
    found = list(re.finditer(pattern, text))
    return found[-1][1] or "" if found else None


def contains(settings: Contains, answer: Text) -> float:
    """1 if one of the texts occurs in the answer."""
    if settings.text is None and not all(each.strip() for each in answer.wanted):
        raise Unscorable("the right answer is empty, and would occur in every answer")
    text, wanted = answer.text, answer.wanted
    if settings.ignore_case:
        text, wanted = text.casefold(), [each.casefold() for each in wanted]
    return float(any(each in text for each in wanted))


def regex(settings: Regex, answer: Text) -> float:
    """1 if the expression matches the answer."""
    if settings.full:
        return float(re.fullmatch(settings.pattern, answer.text.strip()) is not None)
    return float(re.search(settings.pattern, answer.text) is not None)


def tagged(settings: Format, answer: Text) -> float:
    """1 if the answer is a sequence of tagged parts, none of which is empty."""
    text = f"<{settings.tags[0]}>{answer.text}" if settings.opened else answer.text
    if any(text.count(f"<{slash}{tag}>") != 1 for tag in settings.tags for slash in ("", "/")):
        return 0.0
    parts = r"\s*".join(f"<{re.escape(tag)}>(.*)</{re.escape(tag)}>" for tag in settings.tags)
    found = re.fullmatch(parts, text.strip(), re.DOTALL)
    return float(found is not None and all(part.strip() for part in found.groups()))


def length(settings: Length, answer: Text) -> float:
    """Soft overlong punishment (DAPO, equation 13)."""
    over = answer.num_tokens - (settings.max_tokens - settings.soft_tokens)
    if over <= 0:
        return 0.0
    return -min(over / settings.soft_tokens, 1.0) if settings.soft_tokens else -1.0


def f1(settings: F1, answer: Text) -> float:
    """Best F1 of words over the right answers."""
    # Without the words that do not count, an answer such as "A" would be equal to an empty one.
    wanted = [each for each in answer.wanted if normalize_answer(each) or not each.strip()]
    if not wanted:
        raise Unscorable(f"the right answer {answer.wanted[0]!r} has only articles and punctuation, which do not count")
    return max(token_f1(answer.text, each) for each in wanted)


def equal_in_mathematics(settings: Math, answer: Text) -> float:
    """1 if math-verify finds the answer equal to one of the right ones.

    Its own time limits are signals, which are not needed here.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # that its time limits are off
    found = parse(answer.text, [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
                  parsing_timeout=None)
    right = [parse(_in_latex(each), parsing_timeout=None) for each in answer.wanted]
    if not all(right):
        raise Unscorable(f"the right answer {answer.wanted[right.index([])]!r} is no mathematical expression")
    return float(any(verify(each, found, timeout_seconds=None) for each in right))


def _in_latex(text: str) -> str:
    """Mark a formula as LaTeX unless it is."""
    return text if re.search(r"\$|\\boxed|\\\(|\\\[", text) else f"${text}$"


def code(settings: Code, answer: Text) -> float:
    """Share of the tests that the program passes, or 1 if it passes all."""
    try:
        share = LANGUAGES[settings.language](answer.text, answer.wanted, settings.timeout, settings.partial)
    except ValueError as error:
        raise Unscorable(f"column {settings.tests}: {error}") from error
    return share if settings.partial else float(share == 1)


LANGUAGES = {"python": share_passed}
SCORES: dict[type[RewardSettings], Callable[[Any, Text], float]] = {
    ExactMatch: exact_match, Contains: contains, Regex: regex, Format: tagged, Length: length, F1: f1,
    Math: equal_in_mathematics, Code: code}
