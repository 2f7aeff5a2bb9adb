"""Beam search, in groups and without a cache: the tokens of transformers (plain beams) and of the torch engine."""

from dataclasses import asdict

import numpy as np
import pytest
import torch
from hf_reference import HFReference
from transformers import GenerationConfig

from jax_engine.models.generate import generate
from lmmods.core.settings import Generation
from lmmods.torch_engine.nn.decoding import generate as torch_generate

PROMPTS = [[5, 6, 7, 8, 9], [11], [30, 4, 21]]


@pytest.fixture(scope="module")
def refs(tmp_path_factory):
    return {name: HFReference(name, "causal", tmp_path_factory.mktemp(name)) for name in ("gpt2", "llama")}


def generate_on_torch(ref, prompts, settings, eos):
    """Return the torch engine's answers, one prompt at a time, since its penalties count padding as text."""
    unused = ("temperature", "top_p", "typical_p", "top_k")
    options = {name: value for name, value in asdict(settings).items() if name not in unused}
    config = GenerationConfig(**options, pad_token_id=0, eos_token_id=eos)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        tokens = torch_generate(ref.torch, ids, torch.ones_like(ids), config)[0, len(prompt):].tolist()
        answers.append(tokens[:next((index for index, token in enumerate(tokens) if token in eos), len(tokens))])
    return answers


GROUPS = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7}


@pytest.mark.parametrize(("name", "options", "eos"), [
    ("llama", {"num_beams": 4}, [2, 11]),
    ("llama", {"num_beams": 3, "length_penalty": -1.0, "min_new_tokens": 3}, [2, 11, 7, 30, 18, 21]),
    ("gpt2", {"num_beams": 5, "length_penalty": 2.0, "repetition_penalty": 1.4, "use_cache": False}, [2, 11, 30]),
    ("llama", {"num_beams": 2, "no_repeat_ngram_size": 2}, [2]),
    ("llama", GROUPS, [2, 11, 7, 30]),
    ("gpt2", {**GROUPS, "num_beams": 6, "num_beam_groups": 3, "use_cache": False, "min_new_tokens": 2,
              "no_repeat_ngram_size": 2, "length_penalty": 0.5}, [2, 11, 30, 5]),
    ("llama", {**GROUPS, "num_beam_groups": 4, "repetition_penalty": 1.3}, [2]),
], ids=lambda value: None if isinstance(value, list) else value if isinstance(value, str) else "-".join(value))
def test_beam_search_finds_the_tokens_of_the_torch_engine(refs, name, options, eos):
    settings = Generation(max_new_tokens=9, **options)
    ref = refs[name]
    answers = generate(ref.net, ref.params, PROMPTS, settings, eos, pad=0)
    assert answers == generate_on_torch(ref, PROMPTS, settings, eos)
    assert len({tuple(answer) for answer in answers}) > 1


def test_a_row_has_the_same_answer_in_any_batch(refs):
    ref, settings = refs["llama"], Generation(max_new_tokens=9, **GROUPS)
    together = generate(ref.net, ref.params, PROMPTS, settings, [2, 11, 7, 30], pad=0)
    assert [generate(ref.net, ref.params, [prompt], settings, [2, 11, 7, 30], pad=0)[0]
            for prompt in PROMPTS] == together


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.7, "no_repeat_ngram_size": 3},
                                     {"do_sample": True, "top_k": 7}], ids=["greedy", "penalties", "sampled"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_without_a_cache_the_tokens_are_the_same(refs, name, options):
    ref = refs[name]
    cached, bare = (generate(ref.net, ref.params, PROMPTS, Generation(max_new_tokens=9, use_cache=use, **options),
                             [2, 11], pad=0, seed=5) for use in (True, False))
    assert bare == cached


@pytest.mark.slow
def test_sampled_beams_are_sampled_without_replacement(refs):
    """For one token, four candidates are sampled in turn, and the more likely of the first two is the answer."""
    ref, rows = refs["gpt2"], 3000
    settings = Generation(max_new_tokens=1, num_beams=2, do_sample=True, top_k=5, temperature=2.0)
    answers = generate(ref.net, ref.params, [PROMPTS[0]] * rows, settings, [], pad=0, seed=3)
    with torch.no_grad():
        logs = ref.torch(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1) / 2.0
    tokens = logs.topk(5).indices
    p = logs[tokens].softmax(-1).numpy().astype(np.float64)
    expected = np.zeros(37)
    for first in range(5):
        for second in set(range(5)) - {first}:
            expected[tokens[min(first, second)]] += p[first] * p[second] / (1 - p[first])
    counts = np.bincount([token for answer in answers for token in answer], minlength=37)
    assert (counts[expected == 0] == 0).all()
    assert (np.abs(counts - rows * expected) <= 4.5 * np.sqrt(rows * expected * (1 - expected)) + 1).all()
