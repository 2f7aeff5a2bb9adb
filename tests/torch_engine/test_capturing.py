"""Captured decoding steps give the tokens of plain steps; `tests/captures.py` imitates CUDA graphs on a CPU."""

import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from lmmods.core.settings import LoRA
from lmmods.torch_engine.nn.building import compile_layers
from lmmods.torch_engine.nn.capturing import ROOM, choose_capture
from lmmods.torch_engine.nn.decoding import Record, generate
from lmmods.torch_engine.nn.lora import add_lora, fuse_adapters
from tests.captures import capture
from tests.torch_engine.test_families import FAMILIES, V, make

SUPPORTED = ("llama", "qwen2", "qwen3", "gemma", "olmo2", "granite", "smollm3", "glm4", "gpt_neox")
LENGTH = 30


def prompts(num_rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of prompts. Their lengths differ, and some are equal."""
    ids = torch.randint(3, V, (num_rows, 9), generator=torch.Generator().manual_seed(0))
    ids[0, :3], ids[1:2, :5] = 0, 0
    ids[3:7] = ids[-1]
    return ids, (ids != 0).long()


class Replays:
    """Capture that lists the number of rows of each repeated step."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.num_captures = 0

    def __call__(self, run):
        replay = capture(run)
        self.num_captures += 1

        def counted():
            logits = replay()
            self.sizes.append(len(logits))
            return logits

        return counted


def both(model: nn.Module, is_sampled: bool = False, num_rows: int = 8, length: int = LENGTH,
         plain: dict | None = None, **options) -> tuple[tuple, tuple, Replays]:
    """Return tokens and log-probabilities of plain and of captured steps, and what was captured.

    Args:
        plain: Arguments of `generate` for plain steps.
    """
    ids, mask = prompts(num_rows)
    config = GenerationConfig(max_new_tokens=length, **{"pad_token_id": 0, "eos_token_id": [5, 11, 17, 23]} | options)
    uniforms = torch.rand(num_rows, length, generator=torch.Generator().manual_seed(1))
    sampling = {"do_sample": True, "top_k": 0, "uniforms": uniforms} if is_sampled else {}
    results, replays = [], Replays()
    for option in (plain or {}, {"capture": replays}):
        record = Record(num_rows, length, ids.device)
        tokens = generate(model, ids, mask, config, record=record, **sampling, **option)
        is_token = tokens[:, ids.shape[1]:] != 0
        results.append((tokens, record.logps[:, :is_token.shape[1]] * is_token))
    return *results, replays


def check(plain, captured, tolerance: float = 1e-5) -> None:
    assert captured[0].tolist() == plain[0].tolist()
    assert (captured[1] - plain[1]).abs().max() < tolerance


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("name", SUPPORTED)
def test_captured_steps_give_the_same_tokens(name, is_sampled):
    plain, captured, replays = both(make(name).double().eval(), is_sampled)
    check(plain, captured)
    assert replays.sizes


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SUPPORTED])
def test_other_families_report_why_steps_are_not_captured(name, capsys):
    model = make(name).eval()
    for _ in range(2):
        plain, captured, replays = both(model, length=6)
        check(plain, captured)
    assert not replays.num_captures
    assert capsys.readouterr().out.count("without CUDA graphs, in spite of model.cuda_graphs: ") == 1


def test_a_batch_that_has_halved_is_captured_again():
    """Rows end at different steps; at least three numbers of rows are repeated."""
    plain, captured, replays = both(make("llama").double().eval(), True, num_rows=16, length=60)
    check(plain, captured)
    assert replays.sizes == sorted(replays.sizes, reverse=True) and replays.num_captures == len(set(replays.sizes))
    assert len(set(replays.sizes)) >= 3, replays.sizes


def test_answers_longer_than_the_cache_are_captured_again():
    length = 2 * ROOM + 120
    plain, captured, replays = both(make("qwen2").double().eval(), num_rows=2, length=length, eos_token_id=[])
    check(plain, captured)
    assert replays.num_captures == 3 and len(replays.sizes) > length - 8


def test_processors_and_one_row():
    model = make("llama").double().eval()
    for num_rows in (1, 8):
        plain, captured, replays = both(model, num_rows=num_rows, repetition_penalty=1.3, no_repeat_ngram_size=2,
                                        min_new_tokens=3)
        check(plain, captured)
        assert replays.sizes


@pytest.mark.parametrize("is_fused", [False, True])
def test_adapters_on_4_bit_layers(is_fused):
    model = make("llama").eval()
    for parent in [part for name, part in model.named_modules() if name.endswith(("self_attn", "mlp"))]:
        for name, linear in list(parent.named_children()):
            if isinstance(linear, nn.Linear):
                packed = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4",
                                           compute_dtype=torch.float32)
                packed.load_state_dict(linear.state_dict())
                setattr(parent, name, packed.to("cpu"))
    model.is_loaded_in_4bit = True
    model = add_lora(model, LoRA(rank=2, targets="all-linear", dropout=0.1), [], torch.float32, "CAUSAL_LM", 0).eval()
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.2)
    if is_fused:
        fuse_adapters(model)
    for context in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        # Attention over a fixed size rounds differently, so compare with the same steps without a capture.
        with context:
            plain, captured, replays = both(model, True, plain={"capture": lambda run: run})
        check(plain, captured, 1e-12)
        assert replays.sizes


def test_compiled_layers_run_uncompiled():
    model = make("llama").double().eval()
    expected, _, _ = both(model)
    compile_layers(model)
    ids, mask = prompts()
    replays = Replays()
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0, eos_token_id=[])
    tokens = generate(model, ids, mask, config, capture=replays)
    assert len(replays.sizes) == 2
    assert tokens[0].tolist() == expected[0][0, :13].tolist()


def test_a_step_that_waits_for_the_gpu_cannot_be_captured():
    def wait():
        x = torch.ones(3)
        return x * x.sum().item()

    with pytest.raises(RuntimeError, match="not permitted"):
        capture(wait)


def test_graphs_need_a_gpu():
    assert choose_capture(True, torch.device("cpu")) is None
    assert choose_capture(False, torch.device("cuda")) is None
    assert choose_capture(True, torch.device("cuda", 1)) is not None
