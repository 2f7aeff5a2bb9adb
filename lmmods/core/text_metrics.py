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
    """Lower case without punctuation, articles and extra spaces, as SQuAD's evaluation defines it."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(prediction: str, gold: str) -> float:
    """Return 1 if both are equal after normalisation."""
    return float(normalize_answer(prediction) == normalize_answer(gold))


def token_f1(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall over normalised words; an empty side is right only if both are."""
    words, wanted = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if not words or not wanted:
        return float(words == wanted)
    common = sum((collections.Counter(words) & collections.Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted))


def best_over_golds(score: Callable[[str, str], float], prediction: str, golds: Sequence[str]) -> float:
    """Return the best score over several right answers; for a question without any, the right answer is "".

    SQuAD v2.0's evaluation skips golds that normalise to nothing, such as "The".
    """
    return max(score(prediction, gold) for gold in [g for g in golds if normalize_answer(g)] or [""])


def _version_1(score: Callable[[str, str], float], prediction: str, golds: Sequence[str]) -> float:
    """v1.1's evaluation keeps such golds, but an empty prediction shares no words with them, so its F1 is 0."""
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
    best = best_over_golds if version_2 else _version_1
    scored = {name: {key: best(score, predictions.get(key, ""), texts) for key, texts in golds.items()}
              for name, score in (("exact_match", exact_match), ("f1", token_f1))}
    answerable = {key for key, texts in golds.items() if texts}
    parts = {"": set(golds)}
    if version_2:
        parts |= {"HasAns_": answerable, "NoAns_": set(golds) - answerable}
    return {f"{part}{name}": 100 * sum(values[key] for key in keys) / len(keys)
            for part, keys in parts.items() if keys for name, values in scored.items()}


def best_threshold(predictions: dict[str, str], golds: Mapping[str, Sequence[str]], null_odds: dict[str, float],
                   score: Callable[[str, str], float]) -> tuple[float, float]:
    """Return the threshold on the no-answer odds that gives the best score, and that score in percent.

    Args:
        predictions: Best non-empty answers.
        golds: Right answers, none for an unanswerable question.
        null_odds: Score of no answer minus that of the best answer; above the threshold the answer is "".
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
    """Accuracy over the questions and over the subjects' means, mean cross-entropy, and accuracy of each subject.

    Args:
        logits: [N, C] of the choices.
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
