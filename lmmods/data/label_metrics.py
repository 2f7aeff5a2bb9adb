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
    predicted, wanted = torch.from_numpy(logits.argmax(1)), torch.from_numpy(labels.astype(np.int64))
    probabilities = _softmax(logits)
    common = {"num_classes": num_labels, "validate_args": False}
    scores = {"accuracy": float((logits.argmax(1) == labels).mean())}
    for name in ("f1_score", "precision", "recall"):
        score = getattr(classification, f"multiclass_{name}")(predicted, wanted, average="macro", **common)
        scores[f"{name.removesuffix('_score')}_macro"] = float(score)
    if num_labels == 2:
        scores["f1"] = float(classification.binary_f1_score(predicted, wanted, validate_args=False))
    # A constant side is 0 as in scikit-learn; torchmetrics has 1, -1 and values between for two labels.
    varies = len(predicted.unique()) > 1 and len(wanted.unique()) > 1
    matthews = classification.multiclass_matthews_corrcoef(predicted, wanted, **common) if varies else 0
    scores["matthews"] = float(matthews)
    ranked = range(1, 2) if num_labels == 2 else range(num_labels if num_labels <= MOST_PAIRS else 0)
    areas = [_roc_auc(probabilities[:, label], labels == label) for label in ranked]
    defined = [area for area in areas if area is not None]
    if defined:
        scores["roc_auc"] = float(np.mean(defined))
    scores["calibration_error"] = float(classification.multiclass_calibration_error(
        torch.from_numpy(probabilities), wanted, n_bins=CALIBRATION_BINS, **common))
    return scores


def multi_label_scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Scores of rows with several labels each: `f1_micro`, `f1_macro` (mean over all labels), `exact_match` of the set.

    Args:
        logits: [N, K]; a label is given where its logit is positive.
        labels: [N, K] bool.
    """
    import torch
    from torchmetrics.functional import classification

    predicted, wanted = torch.from_numpy(logits > 0), torch.from_numpy(labels).long()
    f1 = {f"f1_{average}": float(classification.multilabel_f1_score(
        predicted.long(), wanted, logits.shape[1], average=average, validate_args=False))
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
            warnings.simplefilter("ignore")  # of a small variance, which float64 bears
            scores[name] = float(regression.pearson_corrcoef(*map(torch.from_numpy, pair)))
    return {name: score for name, score in scores.items() if np.isfinite(score)}


def tag_scores(predicted: np.ndarray, labels: np.ndarray, num_labels: int) -> dict[str, float]:
    """`accuracy` and `f1_macro` of words, over the tags that words have or are given.

    Args:
        predicted: [N] integers, -1 for a word without a prediction.
        labels: [N] integers.
    """
    shares = [_shares(*counts) for counts in zip(*_class_counts(predicted, labels, num_labels), strict=True)
              if counts[1] + counts[2]]
    return {"accuracy": float((predicted == labels).mean()),
            "f1_macro": float(np.mean([share["f1"] for share in shares]))}


def _softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1, equal values share the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[group]


def _roc_auc(scores: np.ndarray, is_positive: np.ndarray) -> float | None:
    """Return the area under the ROC curve; None if all rows are on one side."""
    import torch
    from torchmetrics.functional import classification

    if is_positive.all() or not is_positive.any():
        return None
    # The curve depends on the ranks alone, and shares of one would be taken for logits where one is above 1.
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
        hits, guesses, wanted = ((predicted & labels).sum(0), predicted.sum(0), labels.sum(0))
        return {"names": names, "classes": _table(names, hits, guesses, wanted)}
    size = len(names)
    table = {"names": names, "classes": _table(names, *_class_counts(predicted, labels, size))}
    if size > MOST_PAIRS:
        return table
    has_class = predicted >= 0
    pairs = labels[has_class] * size + predicted[has_class]
    return {**table, "confusion": np.bincount(pairs, minlength=size * size).reshape(size, size).tolist()}


def _class_counts(predicted: np.ndarray, labels: np.ndarray, size: int) -> list[np.ndarray]:
    """Count for each class, [K]: rows that have it and are given it, rows that are given it, rows that have it."""
    return [np.bincount(numbers, minlength=size)
            for numbers in (labels[predicted == labels], predicted[predicted >= 0], labels)]


def _table(names: list[str], hits: Any, guesses: Any, wanted: Any) -> dict[str, dict[str, float]]:
    """Return precision, recall, F1 and support of classes, from counts of each; 0 where a share is of nothing."""
    return {name: {**_shares(int(hit), int(guess), int(want)), "support": int(want)}
            for name, hit, guess, want in zip(names, hits, guesses, wanted, strict=True)}


def _shares(hits: int, guessed: int, wanted: int) -> dict[str, float]:
    return {"precision": hits / guessed if guessed else 0.0, "recall": hits / wanted if wanted else 0.0,
            "f1": 2 * hits / (guessed + wanted) if guessed + wanted else 0.0}


# ---------------------------------------------------------------------------------------------------------------------
# Entities marked by tags.


class Entity(NamedTuple):
    """Words `start` to `end` - 1 of a row."""

    kind: str
    start: int
    end: int


TAG = re.compile(r"([BIESLU])(?:-(.+))?", re.DOTALL)
BEGINS_ALONE = {"B", "S", "U"}  # parts of an entity that nothing precedes
ENDS_ALONE = {"E", "L", "S", "U"}  # parts that nothing follows


def have_entities(names: list[str]) -> bool:
    """True if tags mark entities: as IOB1, IOB2, BIOES or BILOU do, each is O, or one letter of these and a type."""
    others = [name for name in names if name != "O"]
    return bool(others) and all(TAG.fullmatch(name) for name in others) and any(name[0] in "BI" for name in others)


def entity_spans(tags: list[str]) -> list[Entity]:
    """Return the entities of the tags of a row, in any of these schemes and in mixtures of them.

    As conlleval (Tjong Kim Sang 2002) reads them: an entity also starts at an inner word that follows no word of its
    type, so tags out of order, which a model may give, mark entities, too.
    """
    spans: list[Entity] = []
    start, before, kind_before = 0, "O", ""
    for index, tag in enumerate([*tags, "O"]):
        match = TAG.fullmatch(tag)
        part, kind = (match[1], match[2] or "") if match else ("O", "")
        continues = part not in {"O", *BEGINS_ALONE} and before not in {"O", *ENDS_ALONE} and kind == kind_before
        if not continues:
            if before != "O":
                spans.append(Entity(kind_before, start, index))
            start = index
        before, kind_before = part, kind
    return spans


def entity_scores(predicted: list[list[str]], labels: list[list[str]]
                  ) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return precision, recall and F1 of all entities together, and the same with the support of each type.

    An entity is right if its type, its first and its last word are. Without entities on either side all are 0.

    Args:
        predicted: Tags of the words of each row.
        labels: The same of the right ones.
    """
    hits, given, wanted = (Counter[str]() for _ in range(3))
    for guessed, right in zip(predicted, labels, strict=True):
        guesses, golds = set(entity_spans(guessed)), set(entity_spans(right))
        for counter, spans in ((hits, guesses & golds), (given, guesses), (wanted, golds)):
            counter.update(span.kind for span in spans)
    kinds = sorted({*given, *wanted})
    by_type = _table(kinds, *([counter[kind] for kind in kinds] for counter in (hits, given, wanted)))
    return _shares(hits.total(), given.total(), wanted.total()), by_type
