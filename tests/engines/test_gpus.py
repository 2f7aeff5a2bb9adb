"""What only a GPU can show; skipped where there is none. TEST_GPUS_ON=cpu tries these tests themselves on a processor.

The commands of an engine run one after the other in one process, which imports and compiles once. It is not that of the
tests, as JAX keeps the devices with which it has started. One test at a time uses the GPU.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from filelock import FileLock
from transformers import LlamaConfig, LlamaForCausalLM

from lmmods.rollouts.rollout import read_rollout
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.attention import VARLEN, prefer_varlen
from tests.finished_runs import TIMED, rows

ON = os.environ.get("TEST_GPUS_ON", "gpu")
NO_GPU = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs an NVIDIA GPU")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gpu"), *([NO_GPU] if ON == "gpu" else [])]
ENGINES = ["torch", "jax"]
SPAWN = multiprocessing.get_context("spawn")  # a fork could not use CUDA
MOST_SECONDS = 240  # of a command, the imports before the first one included
STEPS = {"trainer__max_steps": 4}


class Worker:
    """A process that runs the commands of an engine."""

    def __init__(self) -> None:
        self._commands, other = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(other,))
        self.process.start()
        other.close()

    def __call__(self, *arguments: str) -> None:
        self._commands.send(arguments)
        assert self._commands.poll(MOST_SECONDS), f"no end after {MOST_SECONDS} seconds: {arguments}"
        assert self._commands.recv() == 0, arguments


def serve(commands: Connection) -> None:
    """Run commands until the other side is gone."""
    from lmmods.cli import main

    while True:
        try:
            arguments = commands.recv()
        except EOFError:
            return
        commands.send(main(list(arguments)))


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Worker]]:
    """The workers by engine, as far as they have started."""
    started: dict[str, Worker] = {}
    yield started
    for worker in started.values():
        worker.process.kill()


@pytest.fixture
def call(workers, tmp_path_factory) -> Iterator[Callable[..., None]]:
    """A function that runs a command on an engine, while no other test uses the GPU."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def run(engine: str, *arguments: str) -> None:
        if engine not in workers:
            workers[engine] = Worker()
        workers[engine](*arguments)

    with FileLock(root / "gpu.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch is on the same GPU
        yield run


# bitsandbytes rounds one in 500 scales of double quantisation otherwise on GPUs than on CPUs, and so than JAX.
ALIKE = {"model__init_args__double_quant": False}


@pytest.fixture
def on_gpu(recipe, tmp_path):
    """A function that writes a recipe for the GPU into a run folder of its own; returns both."""
    def write(folder: str, engine: str, precision: str, **changes) -> tuple[RunFolder, list[str]]:
        run = RunFolder(tmp_path / folder)
        return run, recipe(f"{folder}.yaml", engine=engine, trainer__accelerator=ON, trainer__precision=precision,
                           trainer__default_root_dir=str(run.root), **STEPS | changes)

    return write


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupted_run_ends_with_the_same_bits(call, on_gpu, engine, precision):
    straight, arguments = on_gpu("straight", engine, precision)
    call(engine, "fit", *arguments)
    run, arguments = on_gpu("stopped", engine, precision)
    call(engine, "fit", *arguments, "--stop_at", "3")
    call(engine, "fit", *arguments, "--ckpt_path", "last")
    assert rows(run, TIMED) == rows(straight, TIMED)
    name = "adapter_model.safetensors"
    assert (run.model / name).read_bytes() == (straight.model / name).read_bytes()


@pytest.mark.parametrize("engine", ENGINES)
def test_answers_are_those_of_a_cpu(call, on_gpu, engine):
    from lmmods.cli import main

    run, arguments = on_gpu("run", engine, "32-true", **ALIKE)
    call(engine, "fit", *arguments)
    found = []
    for accelerator in (ON, "cpu"):
        arguments = ("predict", "--config", str(run.config), "--ckpt_path", "last", "--trainer.accelerator",
                     accelerator)
        if accelerator == "cpu":  # in this process, where JAX has no GPU
            assert main(list(arguments)) == 0
        else:
            call(engine, *arguments)
        found.append([json.loads(line) for line in run.predictions.read_text().splitlines()])
    assert found[0] and found[0] == found[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_trained_and_used_under_bfloat16(call, on_gpu, engine):
    run, arguments = on_gpu("run", engine, "bf16-mixed")
    for command, more in (("fit", []), ("validate", ["--ckpt_path", "last"]), ("predict", ["--ckpt_path", "last"])):
        call(engine, command, *arguments, *more)
    assert run.predictions.read_text()


def test_both_engines_draw_the_same_answers(call, on_gpu, tmp_path):
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
        call(engine, "fit", *arguments)
        found.append([answer for group in read_rollout(run.rollouts, "step=0").groups for answer in group.answers])
    assert len(found[0]) == len(found[1]) == 8
    for ours, theirs in zip(*found, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()


@NO_GPU
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
