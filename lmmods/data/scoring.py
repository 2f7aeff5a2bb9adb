"""Choice of a question's answer from the start and end logits of all its windows."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class WindowLogits(NamedTuple):
    """The model's outputs for one window.

    Args:
        start: [T] logits.
        end: [T] logits.
        offsets: [T, 2] first character of each token and the one after its last, in the context; -1 outside it.
        cls_position: Token that means no answer.
    """

    start: np.ndarray
    end: np.ndarray
    offsets: np.ndarray
    cls_position: int


@dataclass
class SpanSettings:
    """Settings for choosing answers, see the fields of QADataFields."""

    n_best_size: int = 20
    max_answer_length: int = 30
    null_score_diff_threshold: float = 0.0
    version_2_with_negative: bool = False


@dataclass
class Answers:
    """Answers by question id, in the form of the three files."""

    predictions: dict[str, str] = field(default_factory=dict)
    nbest: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    null_odds: dict[str, float] = field(default_factory=dict)
    best_non_null: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, answer: str, nbest: list[dict[str, Any]], odds: float, best_non_null: str) -> None:
        """Add the results of `choose_answer` for a question."""
        self.predictions[key], self.nbest[key] = answer, nbest
        self.null_odds[key], self.best_non_null[key] = odds, best_non_null


def choose_answer(context: str, windows: list[WindowLogits], settings: SpanSettings
                  ) -> tuple[str, list[dict[str, Any]], float, str]:
    """Answer, n-best list, no-answer odds, and best non-empty answer of one question over all its windows.

    A span's score is start plus end logit; the score of no answer is the smallest over the windows, since one window
    that contains the answer is enough (Devlin et al. 2018).
    """
    candidates = [candidate for window in windows for candidate in _candidates(window, settings)]
    null = min(((window.start[window.cls_position] + window.end[window.cls_position], window) for window in windows),
               key=lambda pair: pair[0])
    null_score = float(null[0])
    # Spans of all windows compete with each other.
    candidates.sort(key=lambda candidate: -candidate[0])
    nbest: list[dict[str, Any]] = [
        {"text": context[first:last], "score": float(score), "start_logit": float(start), "end_logit": float(end)}
        for score, start, end, first, last in candidates[: settings.n_best_size]]
    if settings.version_2_with_negative:
        window = null[1]
        # Only SQuAD 2.0 has questions without an answer, so only there the empty answer competes.
        nbest.append({"text": "", "score": null_score, "start_logit": float(window.start[window.cls_position]),
                      "end_logit": float(window.end[window.cls_position])})
        nbest.sort(key=lambda entry: -entry["score"])
    if not nbest:
        # No span is possible, for example in a context of special tokens alone.
        nbest = [{"text": "", "score": 0.0, "start_logit": 0.0, "end_logit": 0.0}]
    scores = np.array([entry.pop("score") for entry in nbest])
    # Softmax over the list, shifted so that no exponential overflows.
    exponentials = np.exp(scores - scores.max())
    for entry, probability in zip(nbest, exponentials / exponentials.sum(), strict=True):
        entry["probability"] = float(probability)
    # The best non-empty answer: thresholds on the odds choose between it and the empty one.
    best = next((index for index, entry in enumerate(nbest) if entry["text"]), None)
    best_text = nbest[best]["text"] if best is not None else ""
    odds = null_score - (float(scores[best]) if best is not None else 0.0)
    if settings.version_2_with_negative and odds > settings.null_score_diff_threshold:
        return "", nbest, odds, best_text
    return best_text, nbest, odds, best_text


def _candidates(window: WindowLogits, settings: SpanSettings) -> list[tuple[float, float, float, int, int]]:
    """Return (score, start, end, first character, character after the last) of the best spans of a window."""
    starts = np.argsort(-window.start, kind="stable")[: settings.n_best_size]  # [N] tokens, N = n_best_size at most
    ends = np.argsort(-window.end, kind="stable")[: settings.n_best_size]
    length = ends[None, :] - starts[:, None] + 1  # [N, N] tokens of each span
    # Spans must start and end in the context.
    inside = (window.offsets[starts, 0] >= 0)[:, None] & (window.offsets[ends, 0] >= 0)[None, :]
    candidates = []
    for i, j in zip(*np.nonzero(inside & (length >= 1) & (length <= settings.max_answer_length)), strict=True):
        start, end = window.start[starts[i]], window.end[ends[j]]
        candidates.append((start + end, start, end, int(window.offsets[starts[i], 0]), int(window.offsets[ends[j], 1])))
    return candidates
