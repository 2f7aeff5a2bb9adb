"""SQuAD and multiple-choice scores, the same code for both engines; numpy and the standard library only."""

import collections
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence

import numpy as np

CHOICE_SCORES = ("accuracy", "mean_subject_accuracy", "loss")


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats, capped: float64 overflows near exp(709)."""
    return math.exp(min(loss, 700))


def normalize_answer(text: str) -> str:
    """Return lower case without punctuation, articles and extra spaces, as defined by SQuAD's evaluation."""
    without_punctuation = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", without_punctuation).split())


def exact_match(prediction: str, gold: str) -> float:
    """Return 1 if both are equal after normalisation."""
    return float(normalize_answer(prediction) == normalize_answer(gold))


def token_f1(prediction: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over normalised words; if one side is empty, both must be."""
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if not predicted or not expected:
        return float(predicted == expected)
    common = sum((collections.Counter(predicted) & collections.Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected))


def best_over_golds(score: Callable[[str, str], float], prediction: str, golds: Sequence[str]) -> float:
    """Return the best score over several right answers; for a question without any, the right answer is "".

    SQuAD v2.0's evaluation skips golds that normalise to nothing, such as "The".
    """
    return max(score(prediction, gold) for gold in [g for g in golds if normalize_answer(g)] or [""])


def _version_1(score: Callable[[str, str], float], prediction: str, golds: Sequence[str]) -> float:
    """Return the best score by v1.1's evaluation, which keeps golds that normalise to nothing.

    An empty prediction shares no words with them, so its F1 is 0.
    """
    if score is token_f1 and not normalize_answer(prediction):
        return 0.0
    return max(score(prediction, gold) for gold in golds)


def squad_scores(predictions: dict[str, str], golds: Mapping[str, Sequence[str]], version_2: bool) -> dict[str, float]:
    """Return exact match and F1 in percent, as defined by the evaluation of SQuAD v1.1 or v2.0.

    For v2.0 also `HasAns_*` and `NoAns_*`, over the questions with and without an answer.

    Args:
        predictions: Texts by question id; a missing one counts as the empty answer.
        golds: Right answers by question id, none for an unanswerable question (v2.0).
    """
    best_score = best_over_golds if version_2 else _version_1
    scores = {name: {key: best_score(score, predictions.get(key, ""), texts) for key, texts in golds.items()}
              for name, score in (("exact_match", exact_match), ("f1", token_f1))}
    answerable = {key for key, texts in golds.items() if texts}
    parts = {"": set(golds)}
    if version_2:
        parts |= {"HasAns_": answerable, "NoAns_": set(golds) - answerable}
    return {f"{part}{name}": 100 * sum(values[key] for key in keys) / len(keys)
            for part, keys in parts.items() if keys for name, values in scores.items()}


def best_threshold(predictions: dict[str, str], golds: Mapping[str, Sequence[str]], null_odds: dict[str, float],
                   score: Callable[[str, str], float]) -> tuple[float, float]:
    """Return the threshold on the no-answer odds that gives the best score, and that score in percent.

    Args:
        predictions: Best non-empty answers.
        golds: Right answers, none for an unanswerable question.
        null_odds: Score of no answer minus the best answer's score; above the threshold the answer is "".
        score: `exact_match` or `token_f1`.
    """
    current: float = sum(not texts for texts in golds.values())  # score of always answering nothing
    best, threshold = float(current), 0.0
    for key in sorted(golds, key=lambda key: null_odds[key]):
        if golds[key]:
            current += best_over_golds(score, predictions[key], golds[key])
        else:
            current -= bool(predictions[key])
        if current > best:
            best, threshold = float(current), null_odds[key]
    return threshold, 100 * best / len(golds)


def choice_scores(logits: np.ndarray, answers: np.ndarray, subjects: Sequence[str]) -> dict[str, float]:
    """Return accuracy over questions, mean accuracy of the subjects, mean cross-entropy and accuracy by subject.

    Args:
        logits: [N, C], of the choices.
        answers: [N] index of the right choice.
        subjects: [N], none of them one of CHOICE_SCORES.
    """
    hits = logits.argmax(axis=1) == answers
    log_sums = np.logaddexp.reduce(logits, axis=1)
    losses = log_sums - logits[np.arange(len(answers)), answers]
    names = np.array(subjects)
    by_subject = {str(subject): float(hits[names == subject].mean()) for subject in np.unique(names)}
    overall = (hits.mean(), np.mean(list(by_subject.values())), losses.mean())
    return {**dict(zip(CHOICE_SCORES, map(float, overall), strict=True)), **by_subject}
