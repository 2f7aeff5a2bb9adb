"""Scores of labels, numbers and tags equal scikit-learn's, scipy's and seqeval's; undefined ones are omitted."""

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
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def compute_calibration_error(probabilities, labels, bins=15):
    """Guo et al. 2017, equation 3: the mean gap of accuracy and confidence, by bins of equal width."""
    confidence, hits = probabilities.max(1), probabilities.argmax(1) == labels
    bin_of_row = np.ceil(confidence * bins).astype(int)
    gaps = [hits[bin_of_row == index].sum() - confidence[bin_of_row == index].sum() for index in range(bins + 1)]
    return sum(map(abs, gaps)) / len(hits)


@pytest.mark.parametrize("num_labels,present,seed", [(2, 2, 0), (5, 5, 1), (7, 4, 2), (3, 3, 3)])
def test_single_label_scores_equal_scikit_learn(num_labels, present, seed):
    """Labels that are only predicted are part of every mean, as in scikit-learn."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(present, size=300)
    logits = (rng.normal(size=(300, num_labels)) + 1.5 * np.eye(num_labels)[labels]).astype(np.float32)
    predictions, probabilities = logits.argmax(1), softmax(logits.astype(np.float64))
    scores = single_label_scores(logits, labels)
    expected = {
        "accuracy": metrics.accuracy_score(labels, predictions),
        "f1_macro": metrics.f1_score(labels, predictions, average="macro"),
        "precision_macro": metrics.precision_score(labels, predictions, average="macro", zero_division=0),
        "recall_macro": metrics.recall_score(labels, predictions, average="macro", zero_division=0),
        "matthews": metrics.matthews_corrcoef(labels, predictions),
        "calibration_error": compute_calibration_error(probabilities, labels),
    }
    if num_labels == 2:
        expected |= {"f1": metrics.f1_score(labels, predictions),
                     "roc_auc": metrics.roc_auc_score(labels, probabilities[:, 1])}
    else:
        expected["roc_auc"] = np.mean([metrics.roc_auc_score(labels == label, probabilities[:, label])
                                       for label in range(present)])
    assert scores == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("labels,predictions", [
    ([0, 0, 0], [0, 0, 0]), ([0, 0, 0], [0, 1, 0]), ([0, 1, 0], [0, 0, 0]), ([1], [1]), ([0], [1]), ([1, 1], [0, 0])])
def test_constant_rows_have_defined_scores(labels, predictions):
    labels = np.array(labels)
    scores = single_label_scores(np.eye(2, dtype=np.float32)[predictions], labels)
    assert all(math.isfinite(score) for score in scores.values())
    assert ("roc_auc" in scores) == (len(set(labels.tolist())) == 2)
    assert scores["accuracy"] == pytest.approx(np.mean(labels == predictions))
    assert scores["f1"] == pytest.approx(metrics.f1_score(labels, predictions, zero_division=0), abs=1e-6)
    assert scores["matthews"] == pytest.approx(0, abs=1e-6)


def test_large_logits_and_ties_keep_scores_finite_and_exact():
    """Float32 probabilities of 1 are ties, but their logits may differ."""
    labels = np.array([0, 1, 1, 0, 1, 0])
    logits = np.array([[90, 0], [0, 90], [0, 90], [0, 90], [0, 0], [0, 0]], np.float32)
    scores = single_label_scores(logits, labels)
    assert scores["roc_auc"] == pytest.approx(metrics.roc_auc_score(labels, softmax(logits.astype(float))[:, 1]))
    assert all(map(math.isfinite, single_label_scores(logits * 1e4, labels).values()))


@pytest.mark.parametrize("seed", range(3))
def test_multi_label_scores_equal_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    labels = rng.random((200, 6)) < 0.3
    labels[:, 5] = False  # never a label and never predicted
    logits = rng.normal(size=(200, 6)) + 2 * labels - 1
    logits[:, 5] = -1
    scores = multi_label_scores(logits, labels)
    assert scores == pytest.approx({
        "f1_micro": metrics.f1_score(labels, logits > 0, average="micro"),
        "f1_macro": metrics.f1_score(labels, logits > 0, average="macro", zero_division=0),
        "exact_match": metrics.accuracy_score(labels, logits > 0)}, abs=1e-6)


def test_regression_scores_equal_scipy():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 11, 500) / 2  # with ties
    values = (labels + rng.normal(size=500)).round(1)
    assert regression_scores(values, labels) == pytest.approx({
        "mse": metrics.mean_squared_error(labels, values), "pearson": stats.pearsonr(values, labels).statistic,
        "spearman": stats.spearmanr(values, labels).statistic}, abs=1e-9)


@pytest.mark.parametrize("values,labels", [([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [2, 2, 2]), ([1], [2])])
def test_a_correlation_with_a_constant_is_omitted(values, labels):
    scores = regression_scores(np.array(values, float), np.array(labels, float))
    assert scores == {"mse": pytest.approx(metrics.mean_squared_error(labels, values))}


def test_a_correlation_of_small_numbers_is_accurate():
    labels = 1 + 1e-6 * np.arange(9.0)
    assert regression_scores(labels * 1e-3, labels)["pearson"] == pytest.approx(1)


def test_tag_scores_and_the_table_equal_scikit_learn():
    rng = np.random.default_rng(0)
    labels, predictions = rng.integers(4, size=400), rng.integers(5, size=400)
    assert tag_scores(predictions, labels, 6) == pytest.approx({
        "accuracy": metrics.accuracy_score(labels, predictions),
        "f1_macro": metrics.f1_score(labels, predictions, average="macro"),
    }, abs=1e-6)
    names = list("abcdef")
    report = class_report(predictions, labels, names)
    assert report["names"] == names
    assert report["confusion"] == metrics.confusion_matrix(labels, predictions, labels=range(6)).tolist()
    expected = metrics.classification_report(labels, predictions, labels=range(6), target_names=names, output_dict=True,
                                             zero_division=0)
    for name in names:
        assert report["classes"][name] == pytest.approx(
            {key.replace("-score", ""): value for key, value in expected[name].items()})


def test_words_without_a_predicted_tag_count_as_wrong():
    """As scikit-learn scores a prediction that is not one of the labels."""
    labels, predictions = np.array([0, 0, 1, 2, 2]), np.array([0, -1, 1, -1, 1])
    names = ["a", "b", "c"]
    assert tag_scores(predictions, labels, 3) == pytest.approx({
        "accuracy": metrics.accuracy_score(labels, predictions),
        "f1_macro": metrics.f1_score(labels, predictions, labels=[0, 1, 2], average="macro")})
    report = class_report(predictions, labels, names)
    expected = metrics.classification_report(labels, predictions, labels=[0, 1, 2], target_names=names,
                                             output_dict=True, zero_division=0)
    assert {name: report["classes"][name]["f1"] for name in names} == pytest.approx(
        {name: expected[name]["f1-score"] for name in names})
    assert report["confusion"] == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert [report["classes"][name]["support"] for name in names] == [2, 1, 2]


def test_thousands_of_labels_have_no_confusion_matrix():
    """A confusion matrix would be too large."""
    rng = np.random.default_rng(0)
    labels, logits = rng.integers(3000, size=50), rng.normal(size=(50, 3000)).astype(np.float32)
    assert set(class_report(logits.argmax(1), labels, [str(n) for n in range(3000)])) == {"names", "classes"}
    assert "roc_auc" not in single_label_scores(logits, labels)


def test_the_multi_label_table_equals_scikit_learn():
    rng = np.random.default_rng(1)
    labels, predictions = rng.random((2, 50, 3)) < 0.4
    names = ["a", "b", "c"]
    classes = class_report(predictions, labels, names)["classes"]
    expected = metrics.classification_report(labels, predictions, target_names=names, output_dict=True, zero_division=0)
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
def test_entity_scores_equal_seqeval_for_any_tags(scheme, seed):
    """Also in random order, which a model may predict."""
    rng = random.Random(seed)
    gold, predictions = ([[rng.choice(SCHEMES[scheme]) for _ in range(rng.randint(1, 12))] for _ in range(200)]
                         for _ in range(2))
    predictions = [[*row, *["O"] * 12][: len(expected)] for row, expected in zip(predictions, gold, strict=True)]
    for row in gold:
        spans = [(entity_type, start, end - 1) for entity_type, start, end in entity_spans(row)]
        assert spans == seqeval.sequence_labeling.get_entities(row)
    scores, by_type = entity_scores(predictions, gold)
    assert scores == pytest.approx({"precision": seqeval.precision_score(gold, predictions),
                                    "recall": seqeval.recall_score(gold, predictions),
                                    "f1": seqeval.f1_score(gold, predictions)})
    expected = seqeval.classification_report(gold, predictions, output_dict=True)
    for entity_type, row in by_type.items():
        assert row["f1"] == pytest.approx(expected[entity_type]["f1-score"])
        assert row["support"] == expected[entity_type]["support"]


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
def test_entity_spans_follow_the_tagging_scheme(tags, spans):
    assert entity_spans(tags.split()) == spans


@pytest.mark.parametrize("names,are_marks", [
    (["O", "B-PER", "I-PER"], True), (["B-LOC", "I-LOC"], True), (["O", "I-PER"], True), (["O", "B", "I"], True),
    (["O", "B-a", "L-a", "U-a", "I-a"], True), (["NN", "VB"], False), (["O"], False), (["O", "PER"], False),
    (["S-A", "O"], False), (["O", "B-"], False)])
def test_tag_names_show_whether_they_mark_entities(names, are_marks):
    assert have_entities(names) is are_marks


def test_rows_without_entities_score_zero():
    assert entity_scores([["O"]], [["O"]]) == ({"precision": 0.0, "recall": 0.0, "f1": 0.0}, {})
