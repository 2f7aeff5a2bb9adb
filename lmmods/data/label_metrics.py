"""Scores of labels, numbers and tags over all rows of an evaluation, the same code for both engines.

Each is a fraction (0 to 1) or a coefficient, never NaN: a score that the rows do not define, such as the ROC-AUC of
rows that all have one label, is omitted. torchmetrics does the counting; it is imported where it is used, as it takes a
second.
"""

import re
import warnings
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

CALIBRATION_BINS = 15  # Guo et al. 2017
MOST_PAIRS = 1000  # labels up to which each is compared with each other, or with the rest


def single_label_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the scores of rows with one label each.

    `accuracy`; `f1_macro`, `precision_macro` and `recall_macro`, means over the labels that rows have or are given; for
    two labels `f1` of the second; `matthews` (0 where all rows have, or are given, one label); `roc_auc`, of more than
    two labels the mean over each against the rest, of those that some rows have and others have not, and of at most
    MOST_PAIRS labels; `calibration_error`, of the most likely label in 15 bins.

    Args:
        logits: [N, K], N and K at least 1 and 2.
        labels: [N] integers.
    """
    import torch
    from torchmetrics.functional import classification

    num_labels = logits.shape[1]
    predicted, expected = torch.from_numpy(logits.argmax(1)), torch.from_numpy(labels.astype(np.int64))
    probabilities = _softmax(logits)
    common = {"num_classes": num_labels, "validate_args": False}
    scores = {"accuracy": float((logits.argmax(1) == labels).mean())}
    for name in ("f1_score", "precision", "recall"):
        score = getattr(classification, f"multiclass_{name}")(predicted, expected, average="macro", **common)
        scores[f"{name.removesuffix('_score')}_macro"] = float(score)
    if num_labels == 2:
        scores["f1"] = float(classification.binary_f1_score(predicted, expected, validate_args=False))
    # A constant side is 0 as in scikit-learn; torchmetrics has 1, -1 and values between for two labels.
    varies = len(predicted.unique()) > 1 and len(expected.unique()) > 1
    matthews = classification.multiclass_matthews_corrcoef(predicted, expected, **common) if varies else 0
    scores["matthews"] = float(matthews)
    ranked = range(1, 2) if num_labels == 2 else range(num_labels if num_labels <= MOST_PAIRS else 0)
    areas = [_roc_auc(probabilities[:, label], labels == label) for label in ranked]
    defined = [area for area in areas if area is not None]
    if defined:
        scores["roc_auc"] = float(np.mean(defined))
    scores["calibration_error"] = float(classification.multiclass_calibration_error(
        torch.from_numpy(probabilities), expected, n_bins=CALIBRATION_BINS, **common))
    return scores


def multi_label_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Scores of rows with several labels each: `f1_micro`, `f1_macro` (mean over all labels), `exact_match` of the set.

    Args:
        logits: [N, K]; a label is given where its logit is positive.
        labels: [N, K] bool.
    """
    import torch
    from torchmetrics.functional import classification

    predicted, expected = torch.from_numpy(logits > 0), torch.from_numpy(labels).long()
    f1 = {f"f1_{average}": float(classification.multilabel_f1_score(
        predicted.long(), expected, logits.shape[1], average=average, validate_args=False))
        for average in ("micro", "macro")}
    return {**f1, "exact_match": float(((logits > 0) == labels).all(1).mean())}


def regression_scores(values: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """`mse`, and `pearson` and `spearman` unless one side is constant, where they are not defined.

    Args:
        values: [N] predictions.
        labels: [N].
    """
    import torch
    from torchmetrics.functional import regression

    values, labels = values.astype(np.float64), labels.astype(np.float64)
    scores = {"mse": float(np.mean((values - labels) ** 2))}
    if np.ptp(values) == 0 or np.ptp(labels) == 0:
        return scores
    # torchmetrics' own Spearman ranks in float32.
    for name, pair in (("pearson", (values, labels)), ("spearman", (_ranks(values), _ranks(labels)))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of a small variance, which float64 can represent
            scores[name] = float(regression.pearson_corrcoef(*map(torch.from_numpy, pair)))
    return {name: score for name, score in scores.items() if np.isfinite(score)}


def tag_scores(predicted: np.ndarray, labels: np.ndarray, num_labels: int) -> dict[str, float]:
    """`accuracy` and `f1_macro` of words, over the tags that words have or are given.

    Args:
        predicted: [N] integers, -1 for a word without a prediction.
        labels: [N] integers.
    """
    rates = [_rates(*counts) for counts in zip(*_class_counts(predicted, labels, num_labels), strict=True)
             if counts[1] + counts[2]]
    return {"accuracy": float((predicted == labels).mean()),
            "f1_macro": float(np.mean([tag_rates["f1"] for tag_rates in rates]))}


def _softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1; equal values get their mean rank."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[group]


def _roc_auc(scores: np.ndarray, is_positive: np.ndarray) -> float | None:
    """Return the area under the ROC curve; None if all rows are on one side."""
    import torch
    from torchmetrics.functional import classification

    if is_positive.all() or not is_positive.any():
        return None
    # The curve depends only on ranks; torchmetrics takes values above 1 for logits, so they are scaled.
    ranks = torch.from_numpy(_ranks(scores) / len(scores))
    return float(classification.binary_auroc(ranks, torch.from_numpy(is_positive).long(), validate_args=False))


# ---------------------------------------------------------------------------------------------------------------------
# Counts by class, for the report.


def class_report(predicted: np.ndarray, labels: np.ndarray, names: list[str]) -> dict[str, Any]:
    """Table of the classes, plain JSON: `names`; `classes`, each with precision, recall, f1 and support; and, of rows
    with one label each and up to MOST_PAIRS classes, `confusion`, whose entry [i][j] counts the rows of class i that
    are given class j.

    Args:
        predicted: [N] integers, -1 for a row that is given no class, or [N, K] bool for several labels.
        labels: The right ones, likewise.
        names: Names of the K classes.
    """
    if predicted.ndim == 2:
        hits, guesses, supports = ((predicted & labels).sum(0), predicted.sum(0), labels.sum(0))
        return {"names": names, "classes": _table(names, hits, guesses, supports)}
    size = len(names)
    table = {"names": names, "classes": _table(names, *_class_counts(predicted, labels, size))}
    if size > MOST_PAIRS:
        return table
    has_class = predicted >= 0
    pairs = labels[has_class] * size + predicted[has_class]
    return {**table, "confusion": np.bincount(pairs, minlength=size * size).reshape(size, size).tolist()}


def _class_counts(predicted: np.ndarray, labels: np.ndarray, size: int) -> list[np.ndarray]:
    """Count the hits, predictions and labels of each class, [K] each."""
    return [np.bincount(classes, minlength=size)
            for classes in (labels[predicted == labels], predicted[predicted >= 0], labels)]


def _table(names: list[str], hits: Any, guesses: Any, supports: Any) -> dict[str, dict[str, float]]:
    """Return precision, recall, F1 and support of each class, from its counts; 0 where a denominator is 0."""
    return {name: {**_rates(int(hit), int(guess), int(support)), "support": int(support)}
            for name, hit, guess, support in zip(names, hits, guesses, supports, strict=True)}


def _rates(num_hits: int, num_guesses: int, support: int) -> dict[str, float]:
    return {"precision": num_hits / num_guesses if num_guesses else 0.0,
            "recall": num_hits / support if support else 0.0,
            "f1": 2 * num_hits / (num_guesses + support) if num_guesses + support else 0.0}


# ---------------------------------------------------------------------------------------------------------------------
# Entities marked by tags.


class Entity(NamedTuple):
    """Words `start` to `end` - 1 of a row."""

    type: str
    start: int
    end: int


TAG = re.compile(r"([BIESLU])(?:-(.+))?", re.DOTALL)
BEGINS_ALONE = {"B", "S", "U"}  # parts of an entity that nothing precedes
ENDS_ALONE = {"E", "L", "S", "U"}  # parts that nothing follows


def have_entities(names: list[str]) -> bool:
    """Return whether tags mark entities: IOB1, IOB2, BIOES or BILOU, where each is O, or a letter and a type."""
    marked = [name for name in names if name != "O"]
    return bool(marked) and all(TAG.fullmatch(name) for name in marked) and any(name[0] in "BI" for name in marked)


def entity_spans(tags: list[str]) -> list[Entity]:
    """Return the entities of the tags of a row, in any of these schemes and in mixtures of them.

    As in conlleval (Tjong Kim Sang 2002), an entity also starts at an inner word that follows no word of its type. So
    tags out of order, which a model may predict, also mark entities.
    """
    spans: list[Entity] = []
    start, before, type_before = 0, "O", ""
    for index, tag in enumerate([*tags, "O"]):
        match = TAG.fullmatch(tag)
        part, entity_type = (match[1], match[2] or "") if match else ("O", "")
        continues = part not in {"O", *BEGINS_ALONE} and before not in {"O", *ENDS_ALONE} and entity_type == type_before
        if not continues:
            if before != "O":
                spans.append(Entity(type_before, start, index))
            start = index
        before, type_before = part, entity_type
    return spans


def entity_scores(predicted: list[list[str]], labels: list[list[str]]
                  ) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return precision, recall and F1 of all entities together, and the same with the support of each type.

    An entity is right if its type, its first and its last word are. Without entities on either side all are 0.

    Args:
        predicted: Tags of the words of each row.
        labels: The right tags of the words of each row.
    """
    hit_counts, guess_counts, gold_counts = (Counter[str]() for _ in range(3))
    for predicted_tags, gold_tags in zip(predicted, labels, strict=True):
        guesses, golds = set(entity_spans(predicted_tags)), set(entity_spans(gold_tags))
        for counter, spans in ((hit_counts, guesses & golds), (guess_counts, guesses), (gold_counts, golds)):
            counter.update(span.type for span in spans)
    types = sorted({*guess_counts, *gold_counts})
    by_type = _table(types, *([counter[entity_type] for entity_type in types]
                              for counter in (hit_counts, guess_counts, gold_counts)))
    return _rates(hit_counts.total(), guess_counts.total(), gold_counts.total()), by_type
