"""Sampling answers with the log-probability and entropy of each token: tokens as from `generate`, scores as from
transformers.

Rollouts sample and score answers in one pass; these tests score each answer again, in a pass over the whole text.
"""

from dataclasses import astuple

import numpy as np
import pytest
import torch

from jax_engine.models import generate as generation
from lmmods.core.errors import UserError
from lmmods.core.generation_config import sampling_uniforms
from lmmods.core.settings import Generation
from tests.closeness import assert_as_close, in_both

EOS, NEW, TEMPERATURE = [2, 11], 20, 0.3
PROMPTS = [[5, 6, 7], [9, 8], [5, 6, 7], [4, 30, 12, 9, 9], [5, 6, 7], [9, 8], [17]]  # four distinct ones
ROWS = [3, 70_000, 5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def ref(make_ref):
    return make_ref("llama")


@pytest.fixture(scope="module")
def sampled(ref):
    uniforms = sampling_uniforms(1, ROWS, NEW)
    return generation.sample_answers(ref.net, ref.params, PROMPTS, uniforms, TEMPERATURE, NEW, EOS, pad=0)


def compute_scores(model, prompt, tokens, temperature):
    """Return the log-probability and entropy of each token after a prompt, from transformers' logits."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens.tolist()]])).logits[0, len(prompt) - 1:-1] / temperature
    logs = logits - logits.logsumexp(-1, keepdim=True)
    return logs[torch.arange(len(tokens)), torch.tensor(tokens).long()], -(logs.exp() * logs).sum(-1)


def check_scores(ref, prompts, answers, temperature):
    for prompt, answer in zip(prompts, answers, strict=True):
        actual = (answer.logps, answer.entropies)
        assert all(part.dtype == np.float32 and len(part) == len(answer.tokens) for part in actual)
        expected, exact = in_both(lambda model, p=prompt, a=answer: compute_scores(model, p, a.tokens, temperature),
                                  ref.torch)
        assert_as_close(actual, expected, exact, magnitude=float(np.log(37)))


def remove_end_token(answer):
    return [token for token in answer.tokens.tolist() if token not in EOS]


def test_sampled_tokens_equal_those_of_generate(ref, sampled):
    settings = Generation(max_new_tokens=NEW, do_sample=True, top_k=0, temperature=TEMPERATURE)
    expected = generation.generate(ref.net, ref.params, PROMPTS, settings, EOS, pad=0, seed=1, rows=ROWS)
    assert [remove_end_token(answer) for answer in sampled] == expected
    assert len({len(answer.tokens) for answer in sampled}) > 3  # they end at different times
    assert {answer.ended for answer in sampled} == {True, False}
    for answer, tokens in zip(sampled, expected, strict=True):
        assert answer.tokens.dtype == np.int32 and len(answer.tokens) == len(tokens) + answer.ended
        assert answer.ended == (answer.tokens[-1] in EOS) and (answer.ended or len(tokens) == NEW)


def test_log_probs_and_entropies_equal_a_full_forward_pass(ref, sampled):
    check_scores(ref, PROMPTS, sampled, TEMPERATURE)
    uniforms = sampling_uniforms(1, ROWS[:2], NEW)
    hot = generation.sample_answers(ref.net, ref.params, PROMPTS[:2], uniforms, 1.5, NEW, EOS, pad=0)
    check_scores(ref, PROMPTS[:2], hot, 1.5)


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_greedy_answers_are_scored_at_a_temperature(ref, temperature):
    answers = generation.sample_answers(ref.net, ref.params, PROMPTS, None, temperature, 10, EOS, pad=0)
    expected = generation.generate(ref.net, ref.params, PROMPTS, Generation(max_new_tokens=10), EOS, pad=0)
    assert [remove_end_token(answer) for answer in answers] == expected
    check_scores(ref, PROMPTS, answers, temperature)


def test_scores_do_not_change_when_other_rows_end_early(ref):
    """Most rows end early; the others continue in a smaller batch."""
    settings = Generation(max_new_tokens=90, do_sample=True, top_k=0)
    for count in (20, 30):
        prompts, uniforms = [PROMPTS[row % 7] for row in range(count)], sampling_uniforms(1, range(count), 90)
        answers = generation.sample_answers(ref.net, ref.params, prompts, uniforms, 1.0, 90, EOS, pad=0)
        lengths = sorted(len(answer.tokens) for answer in answers)
        assert lengths[-9] < lengths[-1]
        _, proceed, _ = generation._compiled(ref.net, 32, astuple(settings), tuple(EOS), 1.0)
        assert proceed._cache_size() == 2  # for 32 rows, and for 8
    check_scores(ref, prompts, answers, 1.0)


def test_another_number_of_prompts_compiles_no_new_program(ref):
    before = generation._compiled.cache_info().misses
    uniforms = sampling_uniforms(2, range(8), 3)
    whole = generation.sample_answers(ref.net, ref.params, PROMPTS, uniforms[:7], 1.0, 3, EOS, pad=0)
    for count in (6, 5):
        part = generation.sample_answers(ref.net, ref.params, PROMPTS[:count], uniforms[:count], 1.0, 3, EOS, pad=0)
        assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(part, whole))
    assert generation._compiled.cache_info().misses == before + 1
    settings = Generation(max_new_tokens=3, do_sample=True, top_k=0)
    start, proceed, _ = generation._compiled(ref.net, 32, astuple(settings), tuple(EOS), 1.0)
    assert start._cache_size() == proceed._cache_size() == 1


def test_no_prompts_give_no_answers_and_invalid_prompts_are_errors(ref, make_ref):
    assert generation.sample_answers(ref.net, ref.params, [], np.zeros((0, 5), np.float32), 1.0, 5, EOS, pad=0) == []
    with pytest.raises(UserError, match="empty prompt"):
        generation.sample_answers(ref.net, ref.params, [[5], []], None, 1.0, 5, EOS, pad=0)
    short = make_ref("gpt2")
    with pytest.raises(UserError, match="32 positions"):
        generation.sample_answers(short.net, short.params, [[5, 6]], None, 1.0, 31, EOS, pad=0)
