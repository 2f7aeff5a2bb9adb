"""Tests that need a GPU; skipped without one. TEST_GPUS_ON=cpu runs them on a CPU, to test the tests.

Each engine runs its commands one by one in a single process, which imports and compiles once. It is not the tests'
process, as JAX keeps the devices it started with. One test at a time uses the GPU.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from filelock import FileLock
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from lmmods.rollouts.rollout import read_rollout
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.attention import VARLEN, prefer_varlen
from tests.finished_runs import TIMED, rows

DEVICE = os.environ.get("TEST_GPUS_ON", "gpu")
NO_GPU = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs an NVIDIA GPU")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gpu"), *([NO_GPU] if DEVICE == "gpu" else [])]
ENGINES = ["torch", "jax"]
SPAWN = multiprocessing.get_context("spawn")  # a fork could not use CUDA
MAX_SECONDS = 240  # per command, including the imports before the first one
STEPS = {"trainer__max_steps": 4}


class Worker:
    """Process that runs an engine's commands."""

    def __init__(self) -> None:
        self._commands, worker_end = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(worker_end,))
        self.process.start()
        worker_end.close()

    def __call__(self, *arguments: str) -> None:
        self._commands.send(arguments)
        assert self._commands.poll(MAX_SECONDS), f"no end after {MAX_SECONDS} seconds: {arguments}"
        assert self._commands.recv() == 0, arguments


def serve(commands: Connection) -> None:
    """Run commands until the other end is closed."""
    from lmmods.cli import main

    while True:
        try:
            arguments = commands.recv()
        except EOFError:
            return
        commands.send(main(list(arguments)))


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Worker]]:
    """Yield the started workers by engine."""
    started: dict[str, Worker] = {}
    yield started
    for worker in started.values():
        worker.process.kill()


@pytest.fixture
def run_command(workers, tmp_path_factory) -> Iterator[Callable[..., None]]:
    """Yield a function that runs a command on an engine; no other test uses the GPU meanwhile."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def run(engine: str, *arguments: str) -> None:
        if engine not in workers:
            workers[engine] = Worker()
        workers[engine](*arguments)

    with FileLock(root / "gpu.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch is on the same GPU
        yield run


# With double quantisation, bitsandbytes on GPUs rounds one in 500 scales differently from CPUs and JAX.
SAME_QUANTISATION = {"model__init_args__double_quant": False}


@pytest.fixture
def write_gpu_recipe(recipe, tmp_path):
    """Return a function that writes a GPU recipe and returns its run folder and the arguments."""
    def write(folder: str, engine: str, precision: str, **changes) -> tuple[RunFolder, list[str]]:
        run = RunFolder(tmp_path / folder)
        return run, recipe(f"{folder}.yaml", engine=engine, trainer__accelerator=DEVICE, trainer__precision=precision,
                           trainer__default_root_dir=str(run.root), **STEPS | changes)

    return write


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupted_run_ends_with_the_same_bits(run_command, write_gpu_recipe, engine, precision):
    straight, arguments = write_gpu_recipe("straight", engine, precision)
    run_command(engine, "fit", *arguments)
    run, arguments = write_gpu_recipe("stopped", engine, precision)
    run_command(engine, "fit", *arguments, "--stop_at", "3")
    run_command(engine, "fit", *arguments, "--ckpt_path", "last")
    assert rows(run, TIMED) == rows(straight, TIMED)
    name = "adapter_model.safetensors"
    assert (run.model / name).read_bytes() == (straight.model / name).read_bytes()


@pytest.mark.parametrize("engine", ENGINES)
def test_offloaded_inputs_of_layers_change_no_loss(run_command, write_gpu_recipe, engine):
    losses = []
    for checkpointing in (True, "offload"):
        run, arguments = write_gpu_recipe(f"run-{checkpointing}", engine, "32-true",
                                          model__init_args__gradient_checkpointing=checkpointing)
        run_command(engine, "fit", *arguments)
        losses.append([float(row["train/loss"]) for row in rows(run, TIMED) if row.get("train/loss")])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_gpu_answers_equal_cpu_answers(run_command, write_gpu_recipe, engine):
    from lmmods.cli import main

    run, arguments = write_gpu_recipe("run", engine, "32-true", **SAME_QUANTISATION)
    run_command(engine, "fit", *arguments)
    predictions = []
    for accelerator in (DEVICE, "cpu"):
        arguments = ("predict", "--config", str(run.config), "--ckpt_path", "last", "--trainer.accelerator",
                     accelerator)
        if accelerator == "cpu":  # in this process, where JAX has no GPU
            assert main(list(arguments)) == 0
        else:
            run_command(engine, *arguments)
        predictions.append([json.loads(line) for line in run.predictions.read_text().splitlines()])
    assert predictions[0] and predictions[0] == predictions[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bfloat16_run_trains_validates_and_predicts(run_command, write_gpu_recipe, engine):
    run, arguments = write_gpu_recipe("run", engine, "bf16-mixed")
    for command, more in (("fit", []), ("validate", ["--ckpt_path", "last"]), ("predict", ["--ckpt_path", "last"])):
        run_command(engine, command, *arguments, *more)
    assert run.predictions.read_text()


def test_cuda_graphs_give_the_same_answers(run_command, write_gpu_recipe):
    """Greedy answers of up to 40 tokens, so that most steps are repeated."""
    predictions = []
    for is_captured in (False, True):
        run, arguments = write_gpu_recipe(f"run-{is_captured}", "torch", "32-true",
                                          model__init_args__cuda_graphs=is_captured,
                                          model__init_args__generation={"max_new_tokens": 40})
        run_command("torch", "fit", *arguments)
        run_command("torch", "predict", *arguments, "--ckpt_path", "last")
        predictions.append(run.predictions.read_text())
    assert predictions[0] and predictions[0] == predictions[1]


@NO_GPU
def test_a_replayed_graph_equals_its_steps():
    """Sampled tokens and their log-probabilities, over more tokens than a cache has room for."""
    from lmmods.torch_engine.nn.capturing import ROOM, choose_capture
    from lmmods.torch_engine.nn.decoding import Record, generate

    torch.manual_seed(0)
    device, length = torch.device("cuda"), ROOM + 90
    model = LlamaForCausalLM(LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2)).to(device).eval()
    ids, uniforms = torch.randint(3, 320, (8, 20), device=device), torch.rand(8, length, device=device)
    config = GenerationConfig(max_new_tokens=length, pad_token_id=0, eos_token_id=[], do_sample=True, top_k=0)
    results, graphs = [], []
    make_graph = choose_capture(True, device)
    for capture in (lambda run: run, lambda run: graphs.append(1) or make_graph(run)):
        record = Record(8, length, device)
        tokens = generate(model, ids, torch.ones_like(ids), config, uniforms=uniforms, record=record, capture=capture)
        results.append((tokens, record.logps))
    assert len(graphs) == 2
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], rtol=0, atol=1e-5)


def test_both_engines_sample_the_same_answers(run_command, write_gpu_recipe, tmp_path):
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"instruction": f"Say {word} {len(word)} times.", "input": "", "output": word})
                              + "\n" for word in "one two three four five six seven eight".split()))
    answers = []
    for engine in ENGINES:
        run, arguments = write_gpu_recipe(
            engine, engine, "32-true", **SAME_QUANTISATION, model__class_path="GRPO", data__class_path="PromptData",
            data__init_args__source=str(source), data__init_args__val_size=2, data__init_args__batch_size=8,
            data__init_args__max_length=128, model__init_args__lora={"rank": 4}, model__init_args__num_generations=4,
            model__init_args__max_new_tokens=12, trainer__max_steps=1, trainer__val_check_interval=1,
            model__init_args__rewards=[{"name": "regex", "pattern": "[a-m]"}])
        run_command(engine, "fit", *arguments)
        answers.append([answer for group in read_rollout(run.rollouts, "step=0").groups for answer in group.answers])
    assert len(answers[0]) == len(answers[1]) == 8
    for torch_answer, jax_answer in zip(*answers, strict=True):
        assert torch_answer.tokens.tolist() == jax_answer.tokens.tolist()


@NO_GPU
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_packing_kernel_is_about_as_accurate_as_sdpa(kv_heads):
    """Compare outputs and gradients for a row of three documents with float64."""
    def compute(dtype: torch.dtype, uses_varlen: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=320, hidden_size=256, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=kv_heads)).to("cuda", dtype)
        if uses_varlen:
            prefer_varlen(model)
            assert model.config._attn_implementation == VARLEN
        generator = torch.Generator().manual_seed(1)
        ids, weights = torch.randint(320, (1, 160), generator=generator), torch.randn(1, 160, 320, generator=generator)
        positions = torch.cat([torch.arange(length) for length in (70, 61, 29)])[None]
        logits = model(input_ids=ids.cuda(), position_ids=positions.cuda(), use_cache=False).logits
        (logits * weights.to(logits)).sum().backward()
        return torch.cat([x.detach().double().flatten() for x in (logits, *(p.grad for p in model.parameters()))])

    exact, varlen_result, sdpa_result = (compute(*case) for case in ((torch.float64, False), (torch.bfloat16, True),
                                                                     (torch.bfloat16, False)))
    assert (varlen_result - exact).norm() <= 1.5 * (sdpa_result - exact).norm()
