"""Generation: the tokens of transformers in greedy search, the same filters in sampling."""

from dataclasses import asdict, astuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import logits_process

from jax_engine.models import generate as generation
from lmmods.core.errors import UserError
from lmmods.core.generation_config import sampling_uniforms
from lmmods.core.settings import Generation
from lmmods.torch_engine.nn import decoding

EOS = [2, 11]


def prompts_of(ref):
    random = np.random.default_rng(4)
    return [random.integers(4, 37, size).tolist() for size in (7, 3, 5)]


def generate_on_torch(ref, prompt, settings):
    config = GenerationConfig(max_new_tokens=settings.max_new_tokens, min_new_tokens=settings.min_new_tokens,
                              do_sample=False, repetition_penalty=settings.repetition_penalty, eos_token_id=EOS,
                              no_repeat_ngram_size=settings.no_repeat_ngram_size, pad_token_id=0)
    ids = torch.tensor([prompt])
    tokens = ref.torch.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt):]
    tokens = tokens.tolist()
    return tokens[:next((index for index, token in enumerate(tokens) if token in EOS), len(tokens))]


@pytest.mark.parametrize("settings", [
    Generation(max_new_tokens=14, repetition_penalty=1.7),
    Generation(max_new_tokens=14, no_repeat_ngram_size=2),
    Generation(max_new_tokens=14, no_repeat_ngram_size=1),
    Generation(max_new_tokens=14, min_new_tokens=14, repetition_penalty=0.8, no_repeat_ngram_size=3),
], ids=["penalty", "bigrams", "unigrams", "all"])
def test_constrained_tokens_equal_transformers(make_ref, settings):
    ref = make_ref("gpt2")
    prompts = [[5, 6, 5, 6, 7], [9, 9, 9], [4, 5, 6, 7, 8, 9, 10]]
    answers = generation.generate(ref.net, ref.params, prompts, settings, EOS, pad=0)
    assert answers == [generate_on_torch(ref, prompt, settings) for prompt in prompts]


def test_an_answer_stops_before_the_first_end_token(make_ref):
    ref = make_ref("llama")
    free = generation.generate(ref.net, ref.params, [[5, 6, 7]], Generation(max_new_tokens=8), [], pad=0)[0]
    assert len(free) == 8
    end = free[3]
    stopped = generation.generate(ref.net, ref.params, [[5, 6, 7]], Generation(max_new_tokens=8), [end], pad=0)[0]
    assert stopped == free[:free.index(end)]
    settings = Generation(max_new_tokens=8, min_new_tokens=6)
    longer = generation.generate(ref.net, ref.params, [[5, 6, 7]], settings, [end], pad=0)[0]
    assert len(longer) >= 6 and end not in longer


@pytest.mark.parametrize("size", [1, 7, 60, 1000])
def test_the_kth_largest_value_equals_that_of_a_sorted_row(size):
    random = np.random.default_rng(size)
    for values in (random.normal(size=(3, size)), random.integers(0, 5, (3, size))):  # the second with equal values
        for k in {1, 2, 5, 50, size - 1, size} & set(range(1, size + 1)):
            values_at_k = generation.kth_largest(jnp.asarray(values, jnp.float32), k)
            assert np.array_equal(values_at_k, np.sort(values.astype(np.float32), 1)[:, -k])


@pytest.mark.parametrize(("filter_logits", "reference"), [
    (lambda x: generation.keep_top_k(x, 5), logits_process.TopKLogitsWarper(5)),
    (lambda x: generation.keep_top_k(x, 500), logits_process.TopKLogitsWarper(500)),
    (lambda x: generation.keep_top_p(x, 0.7), logits_process.TopPLogitsWarper(0.7)),
    (lambda x: generation.keep_top_p(x, 0.01), logits_process.TopPLogitsWarper(0.01)),
    (lambda x: generation.keep_typical(x, 0.6), logits_process.TypicalLogitsWarper(0.6)),
    (lambda x: generation.keep_typical(generation.keep_top_k(x, 9), 0.9),
     lambda ids, x: logits_process.TypicalLogitsWarper(0.9)(ids, logits_process.TopKLogitsWarper(9)(ids, x))),
], ids=["top_k", "top_k_all", "top_p", "top_p_one", "typical", "typical_after_top_k"])
def test_filters_equal_transformers(filter_logits, reference):
    logits = np.random.default_rng(0).normal(size=(20, 31)).astype(np.float32) * 3
    assert np.array_equal(np.asarray(filter_logits(jnp.asarray(logits))), reference(None, torch.tensor(logits)).numpy())


def test_tokens_are_sampled_from_the_filtered_distribution(make_ref):
    ref = make_ref("gpt2")
    settings = Generation(max_new_tokens=1, do_sample=True, temperature=0.7, top_k=6, top_p=0.9)
    answers = generation.generate(ref.net, ref.params, [[5, 6, 7]] * 4000, settings, [], pad=0, seed=3)
    with torch.no_grad():
        logits = ref.torch(torch.tensor([[5, 6, 7]])).logits[:, -1] / 0.7
    filtered = logits_process.TopPLogitsWarper(0.9)(None, logits_process.TopKLogitsWarper(6)(None, logits))
    expected = filtered.softmax(-1)[0].numpy()
    counts = np.bincount([token for answer in answers for token in answer], minlength=37)
    assert (counts[expected == 0] == 0).all()
    spread = np.sqrt(4000 * expected * (1 - expected))
    assert (np.abs(counts - 4000 * expected) <= 4.5 * spread + 1).all()


def test_a_row_has_the_same_answer_in_any_batch_and_another_with_another_seed(make_ref):
    ref = make_ref("llama")
    settings = Generation(max_new_tokens=10, do_sample=True, top_k=0)
    prompts = prompts_of(ref)
    together = generation.generate(ref.net, ref.params, prompts, settings, [], pad=0, seed=1)
    assert generation.generate(ref.net, ref.params, prompts[:1], settings, [], pad=0, seed=1) == together[:1]
    assert generation.generate(ref.net, ref.params, prompts, settings, [], pad=0, seed=2) != together
    twice = generation.generate(ref.net, ref.params, prompts[:1] * 2, settings, [], pad=0, seed=1)
    assert twice[0] != twice[1]


@pytest.mark.parametrize(("name", "use_cache"), [("llama", True), ("llama", False), pytest.param(
    "qwen3_5_text", True, marks=pytest.mark.slow)])
def test_shared_prompts_and_finished_rows_change_no_answer(make_ref, name, use_cache):
    ref, rows = make_ref(name), list(range(20))
    prompts = [prompts_of(ref)[row % 3] for row in rows]
    settings = Generation(max_new_tokens=90, do_sample=True, top_k=0, use_cache=use_cache)
    answers = generation.generate(ref.net, ref.params, prompts, settings, EOS, pad=0, seed=1)
    _, proceed, _ = generation._compiled(ref.net, 32, astuple(settings), tuple(EOS))
    assert proceed._cache_size() == 2  # for 20 rows, and for the few that continue
    assert answers == [generation.generate(ref.net, ref.params, [prompt], settings, EOS, pad=0, seed=1, rows=[row])[0]
                       for prompt, row in zip(prompts, rows, strict=True)]
    lengths = sorted(map(len, answers))
    assert lengths[-6] < lengths[-1]  # most have ended before the last


def test_few_equal_prompts_among_others_get_the_answers_they_get_alone(make_ref):
    """So few that the number of distinct prompts, rounded up, equals the number of rows."""
    ref, settings = make_ref("llama"), Generation(max_new_tokens=8)
    first, *others = prompts_of(ref)
    prompts = [first, first, *others]
    answers = generation.generate(ref.net, ref.params, prompts, settings, EOS, pad=0)
    assert answers == [generation.generate(ref.net, ref.params, [prompt], settings, EOS, pad=0)[0]
                       for prompt in prompts]
    assert answers[1] != answers[2]


@pytest.mark.parametrize("settings", [
    Generation(max_new_tokens=30, do_sample=True, top_k=0, temperature=1.5),
    Generation(max_new_tokens=30, do_sample=True, top_k=12, top_p=0.8, repetition_penalty=1.2, use_cache=False),
    Generation(max_new_tokens=30, do_sample=True, typical_p=0.7, min_new_tokens=20, no_repeat_ngram_size=2),
], ids=["plain", "filtered", "constrained"])
def test_torch_samples_the_same_tokens_in_any_batch(make_ref, settings):
    ref, rows = make_ref("llama"), [4, 70_000, 11]
    prompts = prompts_of(ref)
    answers = generation.generate(ref.net, ref.params, prompts, settings, EOS, pad=0, seed=2**32 - 1, rows=rows)
    config = GenerationConfig(**{name: value for name, value in asdict(settings).items() if value is not None},
                              pad_token_id=0, eos_token_id=EOS)
    uniforms = torch.from_numpy(sampling_uniforms(2**32 - 1, rows, 30))
    for picked in ([0, 1, 2], [2], [1, 0]):
        width = max(len(prompts[row]) for row in picked)
        ids = torch.tensor([[0] * (width - len(prompts[row])) + prompts[row] for row in picked])
        answered = decoding.generate(ref.torch, ids, (ids != 0).long(), config, uniforms=uniforms[picked])
        answered = answered[:, width:].tolist()
        for row, tokens in zip(picked, answered, strict=True):
            assert generation._truncate(tokens, EOS) == answers[row]
    assert max(map(len, answers)) > 5


def test_a_token_is_sampled_where_the_cumulative_probability_exceeds_the_uniform():
    logits = np.log(np.array([0.2, 0.0, 0.5, 0.3, 0.0], np.float32), where=[1, 0, 1, 1, 0],
                    out=np.full(5, -np.inf, np.float32))
    uniforms = np.array([0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-24], np.float32)
    for tokens in (generation.sample_tokens(jnp.tile(logits, (6, 1)), jnp.asarray(uniforms)),
                   decoding.sample_tokens(torch.from_numpy(logits).expand(6, 5), torch.from_numpy(uniforms))):
        assert tokens.tolist() == [0, 0, 2, 2, 3, 3]


def test_a_token_of_probability_zero_is_never_sampled():
    """With uniforms at the values of a cumulative sum in float32, which a parallel sum may shift past such tokens."""
    logits = np.random.default_rng(0).normal(size=50_000).astype(np.float32) * 3
    logits[logits < np.sort(logits)[-2000]] = -np.inf
    sums = np.asarray(jnp.cumsum(jax.nn.softmax(jnp.asarray(logits))))
    uniforms = np.append(np.random.default_rng(1).choice(np.clip(sums, 0, 1 - 2**-24), 300), np.float32(1 - 2**-24))
    for tokens in (jax.jit(jax.vmap(lambda uniform: generation.sample_tokens(jnp.asarray(logits)[None],
                                                                             uniform[None])[0]))(uniforms),
                   decoding.sample_tokens(torch.from_numpy(logits).expand(301, -1), torch.from_numpy(uniforms))):
        assert np.isfinite(logits[np.asarray(tokens)]).all()


def test_random_numbers_of_a_row_are_uniform_and_independent():
    uniforms = sampling_uniforms(5, range(-1, 999), 1000)
    assert np.array_equal(sampling_uniforms(5, [7, 3], 10), uniforms[[8, 4], :10])
    assert not np.array_equal(sampling_uniforms(6, [7], 10), uniforms[[8], :10])
    several = sampling_uniforms(5, [7, 3], 10, answers=4)  # the first answers are those of a row with one
    assert np.array_equal(several[::4], uniforms[[8, 4], :10])
    assert np.array_equal(several[:2], sampling_uniforms(5, [7], 10, 2))
    assert len(np.unique(sampling_uniforms(5, range(50), 100, answers=4))) > 0.99 * 50 * 100 * 4
    assert 0 <= uniforms.min() and uniforms.max() < 1
    for axis in (0, 1):  # rows and columns: means of a thousand numbers of variance 1/12
        assert np.abs(uniforms.mean(axis) - 0.5).max() < 5 / np.sqrt(12 * 1000)
    cells = np.bincount((uniforms.reshape(-1) * 256).astype(int), minlength=256)
    assert ((cells - 1e6 / 256) ** 2).sum() / (1e6 / 256) < 255 + 5 * np.sqrt(2 * 255)
    neighbour_correlations = [np.corrcoef(uniforms[:-1].ravel(), uniforms[1:].ravel())[0, 1],
                              np.corrcoef(uniforms[:, :-1].ravel(), uniforms[:, 1:].ravel())[0, 1]]
    assert np.abs(neighbour_correlations).max() < 5e-3


def test_each_length_bucket_compiles_one_program(make_ref):
    ref = make_ref("llama")
    settings = Generation(max_new_tokens=3)
    before = generation._compiled.cache_info().misses
    for size in (1, 5, 31, 32):
        generation.generate(ref.net, ref.params, [[5] * size], settings, EOS, pad=0)
    assert generation._compiled.cache_info().misses == before + 1
    for program in generation._compiled(ref.net, 32, astuple(settings), tuple(EOS))[:2]:
        assert program._cache_size() == 1
    generation.generate(ref.net, ref.params, [[5] * 33], settings, EOS, pad=0)
    assert generation._compiled.cache_info().misses == before + 2


@pytest.mark.parametrize(("settings", "message"), [
    (Generation(penalty_alpha=0.6, top_k=4), "penalty_alpha is 0.6.*contrastive"),
    (Generation(num_beams=4, num_beam_groups=2), "diversity_penalty is 0.0, but num_beam_groups 2"),
    (Generation(num_beams=5, num_beam_groups=2, diversity_penalty=1.0), "num_beam_groups 2 must divide num_beams 5"),
    (Generation(num_beams=4, num_beam_groups=2, diversity_penalty=1.0, do_sample=True), "do_sample"),
    (Generation(max_new_tokens=31), "max_new_tokens is 31.*prompt of 2 tokens.*32 positions"),
])
def test_unsupported_settings_are_errors(make_ref, settings, message):
    ref = make_ref("gpt2")
    with pytest.raises(UserError, match=message):
        generation.generate(ref.net, ref.params, [[5, 6]], settings, EOS, pad=0)
    with pytest.raises(UserError, match="empty prompt"):
        generation.generate(ref.net, ref.params, [[5, 6], []], Generation(), EOS, pad=0)
