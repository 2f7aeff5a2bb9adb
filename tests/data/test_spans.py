"""Answers over several windows, compared with a search through all spans."""

import itertools

import numpy as np
import pytest

from lmmods.data.scoring import SpanSettings, WindowLogits, choose_answer

CONTEXT = "the quick brown fox jumps over the lazy dog again and again"


def make_windows(seed: int) -> list[WindowLogits]:
    """Return two windows of 8 words that share 4, after a CLS and two question tokens."""
    rng = np.random.default_rng(seed)
    words, at = [], 0
    for word in CONTEXT.split():
        words.append((CONTEXT.index(word, at), CONTEXT.index(word, at) + len(word)))
        at = words[-1][1]
    windows = []
    for first in (0, 4):
        offsets = np.array([(-1, -1)] * 3 + words[first : first + 8])
        start, end = rng.normal(size=(2, len(offsets)))
        windows.append(WindowLogits(start, end, offsets, 0))
    return windows


def search_spans(windows: list[WindowLogits], max_words: int) -> tuple[float, str]:
    """Return the score and text of the best span of all."""
    spans = []
    for window in windows:
        for i, j in itertools.product(range(3, len(window.start)), repeat=2):
            if i <= j < i + max_words:
                spans.append((window.start[i] + window.end[j], CONTEXT[window.offsets[i, 0] : window.offsets[j, 1]]))
    return max(spans)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_span_of_all_windows_is_found(seed):
    windows = make_windows(seed)
    score, text = search_spans(windows, max_words=3)
    answer, nbest, odds, _ = choose_answer(CONTEXT, windows, SpanSettings(n_best_size=20, max_answer_length=3))
    assert answer == text and nbest[0]["text"] == text
    assert nbest[0]["start_logit"] + nbest[0]["end_logit"] == pytest.approx(score)
    assert sum(entry["probability"] for entry in nbest) == pytest.approx(1)
    null = min(window.start[0] + window.end[0] for window in windows)
    assert odds == pytest.approx(null - score)
    for threshold in (odds - 0.1, odds + 0.1):
        settings = SpanSettings(20, 3, threshold, version_2_with_negative=True)
        assert choose_answer(CONTEXT, windows, settings)[0] == ("" if odds > threshold else text)


def test_a_question_without_any_span_gets_an_empty_answer():
    window = WindowLogits(np.zeros(3), np.zeros(3), np.full((3, 2), -1), 0)
    answer, nbest, _, _ = choose_answer("", [window], SpanSettings())
    assert answer == "" and nbest[0]["text"] == "" and nbest[0]["probability"] == 1
