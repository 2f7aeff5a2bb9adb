"""SQuAD scores, computed by hand from the published definitions."""

import pytest

from lmmods.core.text_metrics import best_threshold, exact_match, normalize_answer, squad_scores, token_f1


def test_answers_are_normalised_as_squad_does():
    assert normalize_answer("  The  Cat's, a-hat! ") == "cats ahat"
    assert normalize_answer("An apple a day") == "apple day"
    assert normalize_answer("theatre") == "theatre"


@pytest.mark.parametrize(("prediction", "gold", "em", "f1"), [
    ("the Eiffel Tower", "Eiffel Tower", 1, 1),
    ("Eiffel Tower in Paris", "Eiffel Tower", 0, 2 * 0.5 * 1 / 1.5),
    ("dog dog", "dog cat", 0, 0.5),
    ("", "", 1, 1),
    ("", "cat", 0, 0),
    ("cat", "", 0, 0),
    ("the", "", 1, 1),
])
def test_exact_match_and_f1_of_an_answer(prediction, gold, em, f1):
    assert exact_match(prediction, gold) == em
    assert token_f1(prediction, gold) == pytest.approx(f1)


def test_scores_with_several_golds_missing_predictions_and_unanswerable_questions():
    golds = {"a": ["Paris", "the city of Paris"], "b": [], "c": [], "d": ["42"]}
    scores = squad_scores({"a": "City of Paris", "b": "", "c": "something"}, golds, version_2=True)
    assert scores == {"exact_match": 50.0, "f1": 50.0, "HasAns_exact_match": 50.0, "HasAns_f1": 50.0,
                      "NoAns_exact_match": 50.0, "NoAns_f1": 50.0}


def test_squad_versions_differ_if_a_gold_answer_is_an_article():
    golds, predictions = {"a": ["A", "grade A"]}, {"a": "a"}
    assert squad_scores(predictions, golds, version_2=False) == {"exact_match": 100.0, "f1": 0.0}
    assert squad_scores(predictions, golds, version_2=True)["exact_match"] == 0.0


def test_the_best_threshold_has_the_highest_f1():
    golds = {"a": ["x"], "b": [], "c": ["y z"], "d": []}
    predictions = {"a": "x", "b": "q", "c": "y", "d": "r"}
    odds = {"a": -3.0, "b": 1.0, "c": 0.5, "d": -1.0}
    threshold, best = best_threshold(predictions, golds, odds, token_f1)

    def f1_at(value: float) -> float:
        chosen = {key: text if odds[key] <= value else "" for key, text in predictions.items()}
        return squad_scores(chosen, golds, version_2=True)["f1"]

    assert best == pytest.approx(max(f1_at(value) for value in (-9, *odds.values())))
    assert f1_at(threshold) == pytest.approx(best)
