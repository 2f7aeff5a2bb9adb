"""What only a GPU can show; skipped where there is none.

Runs are processes of their own, as JAX keeps the devices with which it has started.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lmmods.rollouts.rollout import read_rollout
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.attention import VARLEN, prefer_varlen
from tests.finished_runs import TIMED, rows

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(not torch.cuda.device_count(), reason="needs an NVIDIA GPU")]
ENGINES = ["torch", "jax"]
TRAIN = Path(__file__).parents[2] / "train.py"


def call(*arguments: str) -> None:
    # torch and JAX share the GPU with the tests of other workers.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, TRAIN, *arguments], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


# bitsandbytes rounds one in 500 scales of double quantisation otherwise on GPUs than on CPUs, and so than JAX.
ALIKE = {"model__init_args__double_quant": False}


@pytest.fixture
def on_gpu(recipe, tmp_path):
    """A function that writes a recipe for the GPU into a run folder of its own; returns both."""
    def write(folder: str, engine: str, precision: str, **changes) -> tuple[RunFolder, list[str]]:
        run = RunFolder(tmp_path / folder)
        return run, recipe(f"{folder}.yaml", engine=engine, trainer__accelerator="gpu", trainer__precision=precision,
                           trainer__default_root_dir=str(run.root), **changes)

    return write


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupted_run_ends_with_the_same_bits(on_gpu, engine, precision):
    straight, arguments = on_gpu("straight", engine, precision)
    call("fit", *arguments)
    run, arguments = on_gpu("stopped", engine, precision)
    call("fit", *arguments, "--stop_at", "3")
    call("fit", *arguments, "--ckpt_path", "last")
    assert rows(run, TIMED) == rows(straight, TIMED)
    name = "adapter_model.safetensors"
    assert (run.model / name).read_bytes() == (straight.model / name).read_bytes()


@pytest.mark.parametrize("engine", ENGINES)
def test_answers_are_those_of_a_cpu(on_gpu, engine):
    run, arguments = on_gpu("run", engine, "32-true", **ALIKE)
    call("fit", *arguments)
    found = []
    for accelerator in ("gpu", "cpu"):
        call("predict", "--config", str(run.config), "--ckpt_path", "last", "--trainer.accelerator", accelerator)
        found.append([json.loads(line) for line in run.predictions.read_text().splitlines()])
    assert found[0] and found[0] == found[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_trained_and_used_under_bfloat16(on_gpu, engine):
    run, arguments = on_gpu("run", engine, "bf16-mixed")
    for command, more in (("fit", []), ("validate", ["--ckpt_path", "last"]), ("predict", ["--ckpt_path", "last"])):
        call(command, *arguments, *more)
    assert run.predictions.read_text()


def test_both_engines_draw_the_same_answers(on_gpu, tmp_path):
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"instruction": f"Say {word} {len(word)} times.", "input": "", "output": word})
                              + "\n" for word in "one two three four five six seven eight".split()))
    found = []
    for engine in ENGINES:
        run, arguments = on_gpu(
            engine, engine, "32-true", **ALIKE, model__class_path="GRPO", data__class_path="PromptData",
            data__init_args__source=str(source), data__init_args__val_size=2, data__init_args__batch_size=8,
            data__init_args__max_length=128, model__init_args__lora={"rank": 4}, model__init_args__num_generations=4,
            model__init_args__max_new_tokens=12, trainer__max_steps=1, trainer__val_check_interval=1,
            model__init_args__rewards=[{"name": "regex", "pattern": "[a-m]"}])
        call("fit", *arguments)
        found.append([answer for group in read_rollout(run.rollouts, "step=0").groups for answer in group.answers])
    assert len(found[0]) == len(found[1]) == 8
    for ours, theirs in zip(*found, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_kernel_for_packed_rows_is_as_near_to_float64_as_sdpa(kv_heads):
    """Outputs and gradients of a network with a row of three documents."""
    def outcome(dtype: torch.dtype, varlen: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=320, hidden_size=256, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=kv_heads)).to("cuda", dtype)
        if varlen:
            prefer_varlen(model)
            assert model.config._attn_implementation == VARLEN
        generator = torch.Generator().manual_seed(1)
        ids, weights = torch.randint(320, (1, 160), generator=generator), torch.randn(1, 160, 320, generator=generator)
        places = torch.cat([torch.arange(length) for length in (70, 61, 29)])[None]
        logits = model(input_ids=ids.cuda(), position_ids=places.cuda(), use_cache=False).logits
        (logits * weights.to(logits)).sum().backward()
        return torch.cat([x.detach().double().flatten() for x in (logits, *(p.grad for p in model.parameters()))])

    exact, ours, theirs = (outcome(*each) for each in ((torch.float64, False), (torch.bfloat16, True),
                                                       (torch.bfloat16, False)))
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
