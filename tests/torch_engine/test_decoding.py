"""Decoding equals recorded token ids of transformers 4.52.4, whose core had contrastive and group beam search.

The ids were recorded with the models and options below, in a separate environment that is not needed here. For any of
several end tokens, its group search writes the first; the recorded beams end in the first.
"""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lmmods.core.errors import UserError
from lmmods.core.generation_config import UNIT
from lmmods.torch_engine.nn.decoding import (
    CARRIED,
    _forward,
    contrastive_search,
    generate,
    group_beam_search,
    sample_tokens,
)
from tests.torch_engine.test_families import make

SEED = 70_000_000
PADDED = torch.tensor([[0, 0, 0, 5, 17, 33, 8], [0, 41, 7, 9, 90, 12, 64], [3, 14, 15, 92, 65, 35, 89]])
# No padding: transformers 4 counts it in the repetition penalty, newer versions do not.
FULL = torch.tensor([[3, 14, 15, 92, 65, 35, 89], [89, 35, 65, 92, 15, 14, 3]])
RECORDED = [
    ("llama", PADDED,
     {"max_new_tokens": 10, "penalty_alpha": 0.6, "top_k": 4, "eos_token_id": [58, 35]},
     [[87, 59, 74, 6, 58, 0, 0, 0, 0, 0], [60, 37, 5, 1, 1, 23, 35, 0, 0, 0],
      [70, 44, 46, 17, 68, 61, 15, 57, 74, 16]]),
    ("gpt2", PADDED,
     {"max_new_tokens": 10, "penalty_alpha": 0.6, "top_k": 4, "eos_token_id": [40, 62]},
     [[90, 60, 57, 19, 40], [37, 62, 0, 0, 0], [62, 0, 0, 0, 0]]),
    ("llama", PADDED,
     {"max_new_tokens": 10, "penalty_alpha": 0.9, "top_k": 8, "min_new_tokens": 4, "no_repeat_ngram_size": 2,
      "eos_token_id": [6, 94]},
     [[87, 71, 4, 87, 6, 0, 0, 0, 0, 0], [29, 13, 48, 51, 90, 38, 94, 0, 0, 0],
      [88, 20, 93, 59, 95, 88, 85, 10, 40, 95]]),
    ("gpt2", FULL,
     {"max_new_tokens": 10, "penalty_alpha": 0.3, "top_k": 5, "repetition_penalty": 1.3, "eos_token_id": [44, 54]},
     [[57, 40, 84, 62, 44, 0, 0], [62, 84, 17, 82, 40, 57, 54]]),
    ("llama", PADDED,
     {"max_new_tokens": 8, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "eos_token_id": 24},
     [[77, 74, 40, 18, 61, 60, 75, 63], [93, 51, 23, 40, 43, 17, 24, 0], [39, 87, 3, 3, 3, 3, 3, 3]]),
    ("gpt2", PADDED,
     {"max_new_tokens": 8, "num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.0, "num_return_sequences": 3,
      "eos_token_id": 40},
     [[40, 0, 0, 0, 0, 0, 0, 0], [40, 0, 0, 0, 0, 0, 0, 0], [40, 0, 0, 0, 0, 0, 0, 0],
      [67, 12, 12, 12, 37, 86, 12, 37], [67, 12, 12, 47, 37, 86, 12, 37], [18, 17, 37, 17, 92, 58, 58, 92],
      [57, 19, 84, 92, 54, 54, 62, 40], [57, 19, 84, 92, 54, 54, 62, 62], [58, 92, 92, 82, 40, 0, 0, 0]]),
    ("llama", PADDED,
     {"max_new_tokens": 8, "num_beams": 6, "num_beam_groups": 2, "diversity_penalty": 2.0, "length_penalty": 0.5,
      "early_stopping": True, "num_return_sequences": 2, "eos_token_id": 40},
     [[75, 40, 0, 0, 0, 0, 0, 0], [77, 74, 40, 0, 0, 0, 0, 0], [93, 39, 34, 40, 0, 0, 0, 0],
      [93, 39, 34, 39, 34, 40, 0, 0], [19, 63, 67, 63, 48, 40, 0, 0], [89, 3, 3, 3, 3, 3, 3, 3]]),
    ("gpt2", PADDED,
     {"max_new_tokens": 8, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.3, "length_penalty": -1.0,
      "early_stopping": "never", "min_new_tokens": 3, "no_repeat_ngram_size": 2, "num_return_sequences": 2,
      "eos_token_id": [40, 12]},
     [[57, 92, 90, 40, 0, 0, 0, 0], [57, 92, 90, 40, 0, 0, 0, 0], [37, 62, 84, 92, 82, 40, 0, 0],
      [37, 86, 47, 37, 37, 0, 58, 92], [57, 19, 84, 62, 40, 0, 0, 0], [58, 92, 92, 82, 40, 0, 0, 0]]),
    ("llama", FULL,
     {"max_new_tokens": 8, "num_beams": 3, "num_beam_groups": 3, "diversity_penalty": 1.0, "repetition_penalty": 1.3,
      "num_return_sequences": 3, "eos_token_id": 11},
     [[19, 63, 67, 27, 0, 52, 27, 48], [70, 73, 4, 87, 51, 19, 55, 53], [39, 87, 57, 96, 11, 0, 0, 0],
      [46, 23, 59, 57, 39, 84, 36, 1], [3, 46, 71, 55, 26, 38, 30, 77], [46, 71, 50, 18, 61, 64, 1, 84]]),
]


def build(model_type: str) -> torch.nn.Module:
    """Return a two-layer model with hashes of their positions as weights, independent of any random generator."""
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if model_type == "llama":
        model = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                             num_attention_heads=4, num_key_value_heads=2,
                                             max_position_embeddings=128, **ends))
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, **ends))
    start = SEED
    for name, parameter in sorted(model.named_parameters()):
        norm = parameter.dim() == 1 and name.endswith("weight")
        values = torch.from_numpy(hash_range(start, parameter.numel())).view(parameter.shape)
        parameter.data.copy_(norm + 0.35 * values)
        start += parameter.numel()
    model.generation_config = GenerationConfig(bos_token_id=1, pad_token_id=0)
    return model.eval()


def hash_range(start: int, count: int) -> np.ndarray:
    """Return `count` numbers in [-1, 1): SplitMix64 (Steele et al. 2014) of start, start + 1, ..."""
    x = np.arange(start, start + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - 1


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {name: build(name) for name in ("llama", "gpt2")}


def generate_answers(model: torch.nn.Module, prompts: torch.Tensor, **options) -> list[list[int]]:
    config = GenerationConfig(**{"pad_token_id": 0} | options)
    ids = generate(model, prompts, (prompts != 0).long(), config)
    assert ids[:, :prompts.shape[1]].tolist() == prompts.repeat_interleave(len(ids) // len(prompts), 0).tolist()
    return ids[:, prompts.shape[1]:].tolist()


@pytest.mark.parametrize(("name", "prompts", "options", "recorded"), RECORDED)
def test_answers_equal_those_of_transformers_4(models, name, prompts, options, recorded):
    assert generate_answers(models[name], prompts, **options) == recorded


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_contrastive_search_without_penalty_is_greedy_search(models, name):
    config = GenerationConfig(max_new_tokens=12, eos_token_id=[40, 62, 3], pad_token_id=96, no_repeat_ngram_size=2)
    inputs = {"input_ids": PADDED, "attention_mask": (PADDED != 0).long(), "generation_config": config}
    ids = models[name].generate(custom_generate=contrastive_search, penalty_alpha=0.0, top_k=4, **inputs)
    assert ids.tolist() == models[name].generate(**inputs).tolist()


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(("name", "use_cache", "length_penalty"), [("llama", True, 1.0), ("gpt2", False, -0.5)])
def test_one_group_is_plain_beam_search(models, name, use_cache, length_penalty, early_stopping):
    config = GenerationConfig(max_new_tokens=12, eos_token_id=[40, 62, 3], pad_token_id=96, num_beams=4,
                              num_return_sequences=4, repetition_penalty=1.2, length_penalty=length_penalty,
                              early_stopping=early_stopping, use_cache=use_cache)
    inputs = {"input_ids": PADDED, "attention_mask": (PADDED != 0).long(), "generation_config": config}
    ids = models[name].generate(custom_generate=group_beam_search, num_beam_groups=1, diversity_penalty=1.0, **inputs)
    assert ids.tolist() == models[name].generate(**inputs).tolist()


def test_group_beam_search_gives_the_same_without_a_cache(models):
    options = {"max_new_tokens": 8, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "eos_token_id": 40}
    cached = generate_answers(models["gpt2"], PADDED, **options)
    assert generate_answers(models["gpt2"], PADDED, use_cache=False, **options) == cached


@pytest.mark.parametrize("mask", [None, [[0, 1, 1], [1, 1, 1]]])
def test_inputs_of_the_next_step_equal_transformers(models, mask):
    """The cache made by `generate`, one more column for inputs by token, and all other inputs unchanged."""
    records = []

    def step(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        expected = {name: value.clone() if torch.is_tensor(value) else value for name, value in kwargs.items()}
        outputs, result = _forward(model, input_ids, kwargs, prompt=True)
        records.append((result, model._update_model_kwargs_for_generation(outputs, expected)))
        return input_ids

    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    extra = {"token_type_ids": torch.tensor([[0, 0, 1], [0, 1, 1]])} if mask is not None else {}
    models["gpt2"].generate(ids, attention_mask=mask and torch.tensor(mask), max_new_tokens=1, custom_generate=step,
                            **extra)
    [(result, expected)] = records
    assert {name: value.tolist() if torch.is_tensor(value) else value for name, value in result.items()} == {
        name: value.tolist() if torch.is_tensor(value) else value for name, value in expected.items()}
    [cache] = [value for name, value in result.items() if name in CARRIED]
    assert cache.get_seq_length() == 3
    assert result["position_ids"].tolist()[-1] == [0, 1, 2, 3] and ("token_type_ids" in result) == (mask is not None)


@pytest.mark.parametrize("options", [
    {"penalty_alpha": 0.6, "top_k": 4}, {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, {}])
def test_an_adapter_decodes_as_its_merged_model(models, options):
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = get_peft_model(build("llama"), config).eval()
    answers = generate_answers(wrapped, PADDED, max_new_tokens=8, **options)
    assert answers == generate_answers(wrapped.merge_and_unload(), PADDED, max_new_tokens=8, **options)
    assert answers != generate_answers(models["llama"], PADDED, max_new_tokens=8, **options)


def test_other_decoding_methods_equal_transformers(models):
    mask = (PADDED != 0).long()
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}):
        config = GenerationConfig(max_new_tokens=6, pad_token_id=0, **options)
        torch.manual_seed(1)
        expected = models["gpt2"].generate(PADDED, attention_mask=mask, generation_config=config)
        torch.manual_seed(1)
        ids = generate(models["gpt2"], PADDED, mask, config, penalty_alpha=0.0, num_beam_groups=1)
        assert ids.tolist() == expected.tolist()


def test_options_override_the_models_own_and_stay_unchanged():
    model = build("llama")
    options = {"max_new_tokens": 8, "penalty_alpha": 0.6, "top_k": 4}
    plain = generate_answers(model, PADDED, **options)
    model.generation_config = GenerationConfig(pad_token_id=0, do_sample=True, temperature=9.0, num_beams=2,
                                               use_cache=False)
    config = GenerationConfig(pad_token_id=0, **options)
    ids = generate(model, PADDED, (PADDED != 0).long(), config)
    assert ids[:, PADDED.shape[1]:].tolist() == plain
    assert (config.penalty_alpha, config.top_k, config.do_sample) == (0.6, 4, None)


def decoder(name: str) -> torch.nn.Module:
    """Return a model as `build` does, or one with a sliding window of 5 tokens in one of two layers."""
    if name != "sliding":
        return build(name)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.5, use_sliding_window=True, sliding_window=5,
        layer_types=["full_attention", "sliding_attention"], bos_token_id=1, eos_token_id=2)).eval()


@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding"])
@pytest.mark.parametrize("options", [
    {}, {"use_cache": False}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 3}])
def test_greedy_search_equals_transformers(name, options):
    """With repeated prompts, answers that end early, and answers longer than the cache's first capacity."""
    model, prompts = decoder(name), PADDED[[0, 1, 0, 2, 2, 1, 0, 2]]
    inputs = {"input_ids": prompts, "attention_mask": (prompts != 0).long()}
    longest = model.generate(**inputs, generation_config=GenerationConfig(max_new_tokens=75, eos_token_id=[],
                                                                          pad_token_id=0, **options))
    ends = [*longest[:2, 9].tolist(), int(longest[0, 20])]
    config = GenerationConfig(max_new_tokens=75, eos_token_id=ends, pad_token_id=96, **options)
    expected = model.generate(**inputs, generation_config=config)
    assert generate(model, **inputs, generation_config=config).tolist() == expected.tolist()
    config.eos_token_id = None
    expected = model.generate(**inputs, generation_config=config)
    assert generate(model, **inputs, generation_config=config).tolist() == expected.tolist()


def test_repeated_prompts_are_computed_once_and_finished_rows_leave_the_batch(models):
    sizes, model = [], models["llama"]
    prompts = PADDED[[0, 1, 0, 2, 1, 0]]
    full = generate_answers(model, prompts, max_new_tokens=6, eos_token_id=[])
    hook = model.model.embed_tokens.register_forward_hook(lambda _, args, out: sizes.append(tuple(out.shape[:2])))
    # Three of the six rows contain this token.
    ended = generate_answers(model, prompts, max_new_tokens=6, eos_token_id=full[0][1])
    hook.remove()
    assert full[0][1] not in [*full[0][:1], *full[1], *full[3]]
    assert sizes == [(3, 7), (6, 1), (3, 1), (3, 1), (3, 1), (3, 1)][:len(sizes)] and len(sizes) == 6
    assert ended == [row[:2] + [0] * 4 if row == full[0] else row for row in full]


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"penalty_alpha": 0.6, "top_k": 4}])
def test_cudnn_attention_is_off_while_tokens_are_generated(models, options):
    """It would plan for every length. It is on again afterwards, also after an error."""
    is_allowed, states = torch.backends.cuda.cudnn_sdp_enabled, []
    hook = models["llama"].register_forward_pre_hook(lambda *_: states.append(is_allowed()))
    generate_answers(models["llama"], FULL, max_new_tokens=2, **options)
    assert len(states) >= 2 and not any(states) and is_allowed()
    hook.remove()
    hook = models["llama"].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate_answers(models["llama"], FULL, max_new_tokens=2, **options)
    hook.remove()
    assert is_allowed()


def test_a_state_without_rows_is_reported_and_decodes_as_transformers(capsys):
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4)).eval()
    prompts = torch.tensor([[5, 17, 33, 8], [5, 17, 33, 8], [3, 14, 15, 92]])
    config = GenerationConfig(max_new_tokens=6, pad_token_id=0, eos_token_id=[])
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
    for _ in range(2):
        assert generate(model, prompts, torch.ones_like(prompts), config).tolist() == expected.tolist()
    assert capsys.readouterr().out.count("Generation is slower") == 1


@pytest.mark.parametrize(("name", "separable"), [("gemma4_text", True), ("qwen3_5_text", False)])
def test_layers_with_other_states_decode_as_transformers(name, separable, capsys):
    """Layers that share keys and values, and linear attention, with padding and rows that end early."""
    model = make(name).eval()
    prompts = torch.tensor([[0, 0, 5, 17, 33, 8], [0, 0, 5, 17, 33, 8], [3, 14, 15, 9, 26, 5], [0, 7, 7, 2, 9, 4]])
    mask = (prompts > 0).long()
    config = GenerationConfig(max_new_tokens=8, pad_token_id=0, eos_token_id=[])
    full = model.generate(prompts, attention_mask=mask, generation_config=config)
    config.eos_token_id = [int(full[2, 8])]
    for settings in (GenerationConfig(max_new_tokens=8, pad_token_id=0, eos_token_id=[]), config):
        expected = model.generate(prompts, attention_mask=mask, generation_config=settings)
        assert generate(model, prompts, mask, settings).tolist() == expected.tolist()
    assert capsys.readouterr().out.count("Generation is slower") == (not separable)


@pytest.mark.parametrize("size", [5, 256, 1000])
def test_a_sampled_token_is_the_first_whose_cumulative_probability_exceeds_the_number(size):
    """Computed with exact sums of integers, token by token."""
    generator = np.random.default_rng(size)
    scores = torch.from_numpy(generator.normal(size=(40, size)).astype(np.float32) * 4)
    scores[:, ::3] = -torch.inf
    numbers = torch.from_numpy(generator.random(40, np.float32))
    numbers[:2] = torch.tensor([0.0, 1 - 2**-24])
    for row, number, token in zip(scores, numbers, sample_tokens(scores, numbers).tolist(), strict=True):
        sums = np.cumsum(np.round(row.softmax(-1).numpy() / np.float32(UNIT)).astype(np.int64))
        threshold = min(int(number.numpy() * np.float32(sums[-1])), sums[-1] - 1)
        assert token == int(np.searchsorted(sums, threshold, side="right"))


@pytest.mark.parametrize(("options", "message"), [
    ({"penalty_alpha": 0.6, "num_beams": 2}, "num_beams 2"),
    ({"penalty_alpha": 0.6, "do_sample": True}, "do_sample"),
    ({"penalty_alpha": 0.6, "top_k": 0}, "top_k"),
    ({"penalty_alpha": 0.6, "use_cache": False}, "use_cache"),
    ({"penalty_alpha": 1.5}, "penalty_alpha is 1.5"),
    ({"num_beams": 5, "num_beam_groups": 2, "diversity_penalty": 1.0}, "num_beam_groups 2 must divide num_beams 5"),
    ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "do_sample": True}, "do_sample"),
    ({"num_beams": 4, "num_beam_groups": 2}, "diversity_penalty is 0.0"),
])
def test_invalid_generation_options_are_rejected_by_name(models, options, message):
    with pytest.raises(UserError, match=message):
        generate_answers(models["llama"], PADDED, max_new_tokens=2, **options)
