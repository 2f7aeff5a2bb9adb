"""Scores of labels, numbers and tags are those of scikit-learn, scipy and seqeval; others are defined or left out."""

import math
import random

import numpy as np
import pytest
from scipy import stats
from seqeval import metrics as seqeval
from sklearn import metrics

from lmmods.data.label_metrics import (
    class_report,
    entity_scores,
    entity_spans,
    have_entities,
    multi_label_scores,
    regression_scores,
    single_label_scores,
    tag_scores,
)


def softmax(logits):
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def calibration_error(probabilities, labels, bins=15):
    """Guo et al. 2017, equation 3: the mean gap of accuracy and confidence, by bins of equal width."""
    confidence, hits = probabilities.max(1), probabilities.argmax(1) == labels
    place = np.ceil(confidence * bins).astype(int)
    gaps = [hits[place == number].sum() - confidence[place == number].sum() for number in range(bins + 1)]
    return sum(map(abs, gaps)) / len(hits)


@pytest.mark.parametrize("num_labels,present,seed", [(2, 2, 0), (5, 5, 1), (7, 4, 2), (3, 3, 3)])
def test_single_label_scores_are_scikit_learns(num_labels, present, seed):
    """Labels that no row has, but that are given to some, are part of every mean, as there."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(present, size=300)
    logits = (draw.normal(size=(300, num_labels)) + 1.5 * np.eye(num_labels)[labels]).astype(np.float32)
    given, shares = logits.argmax(1), softmax(logits.astype(np.float64))
    scores = single_label_scores(logits, labels)
    expected = {
        "accuracy": metrics.accuracy_score(labels, given),
        "f1_macro": metrics.f1_score(labels, given, average="macro"),
        "precision_macro": metrics.precision_score(labels, given, average="macro", zero_division=0),
        "recall_macro": metrics.recall_score(labels, given, average="macro", zero_division=0),
        "matthews": metrics.matthews_corrcoef(labels, given),
        "calibration_error": calibration_error(shares, labels),
    }
    if num_labels == 2:
        expected |= {"f1": metrics.f1_score(labels, given), "roc_auc": metrics.roc_auc_score(labels, shares[:, 1])}
    else:
        expected["roc_auc"] = np.mean([metrics.roc_auc_score(labels == label, shares[:, label])
                                       for label in range(present)])
    assert scores == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("labels,given", [
    ([0, 0, 0], [0, 0, 0]), ([0, 0, 0], [0, 1, 0]), ([0, 1, 0], [0, 0, 0]), ([1], [1]), ([0], [1]), ([1, 1], [0, 0])])
def test_constant_rows_have_defined_scores(labels, given):
    labels = np.array(labels)
    scores = single_label_scores(np.eye(2, dtype=np.float32)[given], labels)
    assert all(math.isfinite(score) for score in scores.values())
    assert ("roc_auc" in scores) == (len(set(labels.tolist())) == 2)
    assert scores["accuracy"] == pytest.approx(np.mean(labels == given))
    assert scores["f1"] == pytest.approx(metrics.f1_score(labels, given, zero_division=0), abs=1e-6)
    assert scores["matthews"] == pytest.approx(0, abs=1e-6)


def test_large_logits_and_ties_in_the_curve():
    """Probabilities of 1 in float32 are ties, the logits behind them are not always."""
    labels = np.array([0, 1, 1, 0, 1, 0])
    logits = np.array([[90, 0], [0, 90], [0, 90], [0, 90], [0, 0], [0, 0]], np.float32)
    scores = single_label_scores(logits, labels)
    assert scores["roc_auc"] == pytest.approx(metrics.roc_auc_score(labels, softmax(logits.astype(float))[:, 1]))
    assert all(map(math.isfinite, single_label_scores(logits * 1e4, labels).values()))


@pytest.mark.parametrize("seed", range(3))
def test_multi_label_scores_are_scikit_learns(seed):
    draw = np.random.default_rng(seed)
    labels = draw.random((200, 6)) < 0.3
    labels[:, 5] = False  # no row has it, and none is given it
    logits = draw.normal(size=(200, 6)) + 2 * labels - 1
    logits[:, 5] = -1
    scores = multi_label_scores(logits, labels)
    assert scores == pytest.approx({
        "f1_micro": metrics.f1_score(labels, logits > 0, average="micro"),
        "f1_macro": metrics.f1_score(labels, logits > 0, average="macro", zero_division=0),
        "exact_match": metrics.accuracy_score(labels, logits > 0)}, abs=1e-6)


def test_regression_scores_are_scipys():
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 11, 500) / 2  # with ties
    values = (labels + draw.normal(size=500)).round(1)
    assert regression_scores(values, labels) == pytest.approx({
        "mse": metrics.mean_squared_error(labels, values), "pearson": stats.pearsonr(values, labels).statistic,
        "spearman": stats.spearmanr(values, labels).statistic}, abs=1e-9)


@pytest.mark.parametrize("values,labels", [([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [2, 2, 2]), ([1], [2])])
def test_a_correlation_with_a_constant_is_left_out(values, labels):
    scores = regression_scores(np.array(values, float), np.array(labels, float))
    assert scores == {"mse": pytest.approx(metrics.mean_squared_error(labels, values))}


def test_a_correlation_of_small_numbers():
    labels = 1 + 1e-6 * np.arange(9.0)
    assert regression_scores(labels * 1e-3, labels)["pearson"] == pytest.approx(1)


def test_tag_scores_and_the_table_are_scikit_learns():
    draw = np.random.default_rng(0)
    labels, given = draw.integers(4, size=400), draw.integers(5, size=400)
    assert tag_scores(given, labels, 6) == pytest.approx({
        "accuracy": metrics.accuracy_score(labels, given), "f1_macro": metrics.f1_score(labels, given, average="macro"),
    }, abs=1e-6)
    names = list("abcdef")
    report = class_report(given, labels, names)
    assert report["names"] == names
    assert report["confusion"] == metrics.confusion_matrix(labels, given, labels=range(6)).tolist()
    expected = metrics.classification_report(labels, given, labels=range(6), target_names=names, output_dict=True,
                                             zero_division=0)
    for name in names:
        assert report["classes"][name] == pytest.approx(
            {key.replace("-score", ""): value for key, value in expected[name].items()})


def test_words_without_a_tag_are_wrong():
    """As scikit-learn scores a prediction that is none of the labels."""
    labels, given = np.array([0, 0, 1, 2, 2]), np.array([0, -1, 1, -1, 1])
    names = ["a", "b", "c"]
    assert tag_scores(given, labels, 3) == pytest.approx({
        "accuracy": metrics.accuracy_score(labels, given),
        "f1_macro": metrics.f1_score(labels, given, labels=[0, 1, 2], average="macro")})
    report = class_report(given, labels, names)
    expected = metrics.classification_report(labels, given, labels=[0, 1, 2], target_names=names, output_dict=True,
                                             zero_division=0)
    assert {name: report["classes"][name]["f1"] for name in names} == pytest.approx(
        {name: expected[name]["f1-score"] for name in names})
    assert report["confusion"] == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert [report["classes"][name]["support"] for name in names] == [2, 1, 2]


def test_thousands_of_labels():
    """Without a comparison of each with each."""
    draw = np.random.default_rng(0)
    labels, logits = draw.integers(3000, size=50), draw.normal(size=(50, 3000)).astype(np.float32)
    assert set(class_report(logits.argmax(1), labels, [str(n) for n in range(3000)])) == {"names", "classes"}
    assert "roc_auc" not in single_label_scores(logits, labels)


def test_the_table_of_several_labels():
    draw = np.random.default_rng(1)
    labels, given = draw.random((2, 50, 3)) < 0.4
    names = ["a", "b", "c"]
    classes = class_report(given, labels, names)["classes"]
    expected = metrics.classification_report(labels, given, target_names=names, output_dict=True, zero_division=0)
    for name in "abc":
        assert classes[name]["f1"] == pytest.approx(expected[name]["f1-score"])
        assert classes[name]["support"] == expected[name]["support"]


# Entities

SCHEMES = {
    "IOB2": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"],
    "IOB1": ["O", "I-PER", "B-PER", "I-LOC"],
    "BIOES": ["O", *(f"{part}-{kind}" for part in "BIES" for kind in ("PER", "LOC"))],
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("seed", range(3))
def test_entities_of_any_tags_are_seqevals(scheme, seed):
    """Tags in random order too, which a network may give."""
    draw = random.Random(seed)
    gold, given = ([[draw.choice(SCHEMES[scheme]) for _ in range(draw.randint(1, 12))] for _ in range(200)]
                   for _ in range(2))
    given = [[*row, *["O"] * 12][: len(expected)] for row, expected in zip(given, gold, strict=True)]
    for row in gold:
        spans = [(kind, start, end - 1) for kind, start, end in entity_spans(row)]
        assert spans == seqeval.sequence_labeling.get_entities(row)
    scores, by_type = entity_scores(given, gold)
    assert scores == pytest.approx({"precision": seqeval.precision_score(gold, given),
                                    "recall": seqeval.recall_score(gold, given), "f1": seqeval.f1_score(gold, given)})
    expected = seqeval.classification_report(gold, given, output_dict=True)
    for kind, row in by_type.items():
        assert row["f1"] == pytest.approx(expected[kind]["f1-score"]) and row["support"] == expected[kind]["support"]


@pytest.mark.parametrize("tags,spans", [
    ("B-A I-A O B-A B-A", [("A", 0, 2), ("A", 3, 4), ("A", 4, 5)]),  # IOB2
    ("I-A I-A O I-A B-A I-B", [("A", 0, 2), ("A", 3, 4), ("A", 4, 5), ("B", 5, 6)]),  # IOB1
    ("B-A I-A E-A S-A S-B O", [("A", 0, 3), ("A", 3, 4), ("B", 4, 5)]),  # BIOES
    ("B-A I-A L-A U-A U-B O", [("A", 0, 3), ("A", 3, 4), ("B", 4, 5)]),  # BILOU
    ("B-A I-B", [("A", 0, 1), ("B", 1, 2)]),
    ("E-A E-A", [("A", 0, 1), ("A", 1, 2)]),
    ("B I O B", [("", 0, 2), ("", 3, 4)]),
    ("B-X-Y I-X-Y", [("X-Y", 0, 2)]),
    ("O", []),
    ("", []),
])
def test_spans_by_scheme(tags, spans):
    assert entity_spans(tags.split()) == spans


@pytest.mark.parametrize("names,are_marks", [
    (["O", "B-PER", "I-PER"], True), (["B-LOC", "I-LOC"], True), (["O", "I-PER"], True), (["O", "B", "I"], True),
    (["O", "B-a", "L-a", "U-a", "I-a"], True), (["NN", "VB"], False), (["O"], False), (["O", "PER"], False),
    (["S-A", "O"], False), (["O", "B-"], False)])
def test_which_tags_mark_entities(names, are_marks):
    assert have_entities(names) is are_marks


def test_no_entities_at_all():
    assert entity_scores([["O"]], [["O"]]) == ({"precision": 0.0, "recall": 0.0, "f1": 0.0}, {})
