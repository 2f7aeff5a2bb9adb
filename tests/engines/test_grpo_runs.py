"""GRPO runs: equal under any batch split and on several processes, resumed inside a rollout with the same bits."""

import hashlib
import json
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from lmmods.cli import main
from lmmods.rollouts.rollout import read_rollout
from lmmods.runs.folder import RunFolder
from tests.faults.test_kills import killed_run, resume_if_saved
from tests.finished_runs import TIMED, rows
from tests.forks import Fork, together
from tests.rollouts.test_vllm_server import StandIn

SECONDS = TIMED | {f"train/seconds/{name}" for name in ("drawing", "rewards", "scoring", "all")}
SPLIT_DEPENDENT = SECONDS | {"train/epoch"}
STEPS = 4
REWARDS = [{"name": "regex", "pattern": "[a-m]", "label": "letters"},
           {"name": "length", "max_tokens": 5, "weight": 0.3}]
# Settings of the loss in each case.
CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss": "grpo", "steps_per_rollout": 2, "num_iterations": 2, "scale_rewards": "none"},
    "sequence": {"loss": "dr_grpo", "ratio": "sequence", "num_iterations": 2, "scale_rewards": "batch", "beta": 0.05},
    "cispo": {"loss": "cispo", "steps_per_rollout": 2, "temperature": 0.7, "mask_truncated": True, "beta": 0.1,
              "reference": "copy", "dynamic_sampling": 2},
}


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """Return a folder with the prompts and the runs that several tests compare with."""
    folder = tmp_path_factory.mktemp("grpo")
    (folder / "prompts.jsonl").write_text("".join(
        json.dumps({"instruction": f"Say {word} {index} times.", "input": "", "output": word}) + "\n"
        for index, word in enumerate("one two three four five six seven".split())))
    return folder


@pytest.fixture
def write_recipe(recipe, tmp_path, common):
    """Return a function that writes a case's recipe and returns its run folder and the arguments."""
    source = common / "prompts.jsonl"

    def write(name: str, folder: str, **changes: Any) -> tuple[RunFolder, list[str]]:
        run = RunFolder(tmp_path / folder)
        fields = {"rewards": REWARDS, "num_generations": 4, "max_new_tokens": 6, **CASES[name]}
        return run, recipe(f"{folder}.yaml", **{
            "model__class_path": "GRPO", **{f"model__init_args__{key}": value for key, value in fields.items()},
            "model__init_args__lora": {"rank": 4}, "data__class_path": "PromptData",
            "data__init_args__source": str(source), "data__init_args__val_size": 2,
            "data__init_args__batch_size": 8, "data__init_args__eval_batch_size": 2,
            "data__init_args__max_length": 128, "trainer__max_steps": STEPS, "trainer__val_check_interval": STEPS,
            "trainer__default_root_dir": str(run.root), "checkpoint": {"every_n_steps": 1, "keep_last": 9}, **changes})

    return write


@pytest.fixture
def get_straight_run(write_recipe, common):
    """Return a function that returns a case's uninterrupted run on one process, trained on first use."""
    def get_run(name: str, engine: str = "torch", **changes: Any) -> RunFolder:
        key = hashlib.sha256(repr((name, engine, sorted(changes.items()))).encode()).hexdigest()[:16]
        run, arguments = write_recipe(name, str(common / key), engine=engine, **changes)
        if not run.completed.exists():
            assert main(["fit", *arguments]) == 0
        return run

    return get_run


def load_adapter(run: RunFolder) -> dict[str, np.ndarray]:
    return load_file(run.model / "adapter_model.safetensors")


def assert_close(run: RunFolder, other: RunFolder, weights: bool = True) -> None:
    steps, expected_steps = rows(run, SPLIT_DEPENDENT), rows(other, SPLIT_DEPENDENT)
    assert len(steps) == len(expected_steps) == STEPS + 1
    for row, expected in zip(steps, expected_steps, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5), row["step"]
    for name, values in load_adapter(run).items() if weights else ():
        torch.testing.assert_close(torch.from_numpy(values), torch.from_numpy(load_adapter(other)[name]), rtol=1e-3,
                                   atol=3e-5)


def assert_same_bits(run: RunFolder, other: RunFolder) -> None:
    assert read_files(run) == read_files(other)
    assert rows(run, SECONDS) == rows(other, SECONDS)
    assert all((values == load_adapter(other)[name]).all() for name, values in load_adapter(run).items())


def read_tokens(run: RunFolder) -> dict[str, Any]:
    return {path.stem: [answer.tokens.tolist() for group in read_rollout(run.rollouts, path.stem).groups
                        for answer in group.answers] for path in sorted(run.rollouts.glob("*.safetensors"))}


def read_files(run: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.rollouts.iterdir())}


@pytest.mark.parametrize(("name", "engine"), [*((name, "torch") for name in CASES), ("cispo", "jax")])
def test_any_batch_split_gives_the_same_steps(write_recipe, get_straight_run, name, engine):
    uncut = get_straight_run(name, engine)
    for size in (4, 1):
        run, arguments = write_recipe(name, f"split{size}", engine=engine, data__init_args__batch_size=size,
                                      trainer__accumulate_grad_batches=8 // size)
        assert main(["fit", *arguments]) == 0
        assert read_tokens(run) == read_tokens(uncut)
        assert_close(run, uncut)


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("name", ["grpo", "cispo"])
def test_a_run_resumes_inside_a_rollout_with_the_same_bits(write_recipe, get_straight_run, name, engine):
    """Stopped after each step."""
    straight = get_straight_run(name, engine)
    run, arguments = write_recipe(name, "stopped", engine=engine)
    for step in range(1, STEPS):
        assert main(["fit", *arguments, *resume_if_saved(run), "--stop_at", str(step)]) == 0
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert_same_bits(run, straight)


CONTEXT = {"class_path": "lmmods.strategies.FSDP2", "init_args": {"context_parallel_size": 2}}
TENSOR = {"class_path": "lmmods.strategies.FSDP2", "init_args": {"tensor_parallel_size": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), [("grpo", CONTEXT), ("sequence", TENSOR)], ids=["context", "tensor"])
def test_two_context_or_tensor_parallel_processes_take_the_steps_of_one(write_recipe, get_straight_run, name, strategy):
    full = {"model__init_args__quantize": None, "model__init_args__lora": None, "model__init_args__reference": None,
            # Adam would move parameters without a gradient by rounding errors.
            "model__init_args__optimizer": {"name": "sgd", "lr": 0.1}}
    one = get_straight_run(name, **full)
    two, arguments = write_recipe(name, "two", trainer__devices=2, trainer__strategy=strategy, **full)
    together(["fit", *arguments])
    assert read_tokens(two) == read_tokens(one)
    assert_close(two, one, weights=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), [("sequence", "ddp"), ("cispo", "fsdp")])
def test_two_processes_take_the_steps_of_one(write_recipe, get_straight_run, name, strategy):
    one = get_straight_run(name)
    two, arguments = write_recipe(name, "two", trainer__devices=2, trainer__strategy=strategy,
                                  data__init_args__batch_size=4)
    together(["fit", *arguments])
    assert read_tokens(two) == read_tokens(one)
    assert_close(two, one)


MESH = {"class_path": "jax_engine.distributed.devices.MeshSharding", "init_args": {"fsdp": 2, "tensor": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "strategy"), [(1, 2, "ddp"), (1, 4, MESH), (2, 1, "fsdp")],
                         ids=["devices", "mesh", "processes"])
def test_several_jax_devices_and_processes_take_the_steps_of_one(write_recipe, get_straight_run, processes, devices,
                                                                 strategy):
    one = get_straight_run("cispo", "jax")
    two, arguments = write_recipe("cispo", "two", engine="jax", trainer__devices=devices, trainer__strategy=strategy,
                                  data__init_args__batch_size=4)
    together(["fit", *arguments], processes, devices=devices)
    assert read_tokens(two) == read_tokens(one)
    assert_close(two, one)


@pytest.mark.parametrize("name", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES
                                            if name != "grpo")])
def test_both_engines_sample_the_same_answers_and_take_the_same_steps(get_straight_run, name):
    runs = get_straight_run(name), get_straight_run(name, "jax")
    assert read_tokens(runs[0]) == read_tokens(runs[1])
    assert_close(*runs)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("torch", "jax"), ("jax", "torch")])
def test_the_other_engine_resumes_inside_a_rollout(write_recipe, get_straight_run, first, second):
    straight = get_straight_run("grpo", first)
    run, arguments = write_recipe("grpo", "changed", engine=first)
    assert main(["fit", *arguments, "--stop_at", "1"]) == 0
    files_before = read_files(run)
    assert main(["fit", *write_recipe("grpo", "changed", engine=second)[1], "--ckpt_path", "last"]) == 0
    assert files_before.items() <= read_files(run).items()
    assert read_tokens(run) == read_tokens(straight)
    assert_close(run, straight)


class SamplingServer(StandIn):
    """Server whose tokens depend only on the seed; it reports a probability of 0.1 for each."""

    def reply(self, path: str, body: dict) -> tuple[int, object]:
        status, reply = super().reply(path, body)
        if path == "/v1/completions" and body.get("return_token_ids"):
            random = np.random.default_rng(body["seed"])
            sampled = random.integers(5, 150, random.integers(1, body["max_tokens"])).tolist()
            sampled.append(body["stop_token_ids"][0])
            reply["choices"][0] |= {"token_ids": sampled, "finish_reason": "stop",
                                    "logprobs": {"token_logprobs": [np.log(0.1)] * len(sampled)}}
        return status, reply


@pytest.fixture
def sampling_server():
    server = SamplingServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_rollout_server_samples_with_the_weights_of_each_rollout(write_recipe, sampling_server, engine):
    served = {"model__init_args__rollouts": {"class_path": "VLLMServer",
                                             "init_args": {"url": sampling_server.url, "model": "demo"}},
              "model__init_args__importance_sampling_cap": 2.0, "model__init_args__num_generations_eval": 0}
    straight, arguments = write_recipe("dapo", "straight", engine=engine, **served)
    assert main(["fit", *arguments]) == 0
    assert not sampling_server.adapters and not (straight.root / ".rollouts").exists()
    loaded = [body["lora_path"] for path, body in sampling_server.requests if path == "/v1/load_lora_adapter"]
    # Four rollouts and the final validation, from two folders in turn.
    assert [Path(path).name for path in loaded] == ["0", "1", "0", "1", "0"]
    assert {Path(path).parent.name for path in loaded} == {".rollouts"}
    steps = rows(straight, SECONDS)
    assert all(row["train/sampler_gap"] > 1 for row in steps[:-1])
    # If all answers have the same reward, the step has no ratio.
    assert all(row["train/ratio"] == pytest.approx(1, abs=1e-5) for row in steps if "train/ratio" in row)
    weights = np.concatenate([answer.columns["sampler_weights"] for path in straight.rollouts.glob("*.safetensors")
                              for group in read_rollout(straight.rollouts, path.stem).groups
                              for answer in group.answers])
    assert (weights < 0.5).any() and weights.max() <= 2
    plain, arguments = write_recipe("dapo", "plain", engine=engine,
                                    **{**served, "model__init_args__importance_sampling_cap": None})
    assert main(["fit", *arguments]) == 0
    losses, weighted = ([row["train/loss"] for row in metrics[1:]] for metrics in (rows(plain, SECONDS), steps))
    assert losses != pytest.approx(weighted, rel=1e-2)


def test_a_rollout_server_that_does_not_answer_is_an_error(write_recipe, capfd):
    _, arguments = write_recipe("dapo", "alone", model__init_args__rollouts={
        "class_path": "VLLMServer", "init_args": {"url": "http://127.0.0.1:9", "model": "demo", "retries": 0}})
    assert main(["fit", *arguments]) == 2
    assert "http://127.0.0.1:9 does not answer" in capfd.readouterr().err


# Where a run whose rollouts serve two steps, twice each, is killed, time after time; arguments of `killed_run`. Both
# engines make and read rollouts by the same code; the moments of `LOOP` also depend on the engine's loop.
MOMENTS = {
    "while the first answers are sampled": ("before", "replace", r"rollouts/step=0\.jsonl$"),
    "a rollout is readable but incomplete": ("after", "replace", r"rollouts/step=4\.jsonl$"),
    "a rollout is complete, before its first step": ("after", "replace", r"rollouts/step=4\.safetensors$"),
    "after its first step": ("after", "replace", r"checkpoints/step=5$"),
    "after its first iteration": ("after", "replace", r"checkpoints/step=6$"),
    "halfway through its second iteration": ("before", "replace", r"checkpoints/step=7$"),
}
LOOP = ("while the first answers are sampled", "after its first step", "halfway through its second iteration")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_run_killed_in_rollouts_time_after_time_ends_with_the_same_bits(write_recipe, get_straight_run, engine):
    longer = {"engine": engine, "trainer__max_steps": 8, "trainer__accumulate_grad_batches": 2,
              "data__init_args__batch_size": 4, "trainer__val_check_interval": 8,
              "model__init_args__keep_rollouts": 1, "checkpoint": {"every_n_steps": 1, "keep_last": 2}}
    straight = get_straight_run("grpo", **longer)
    run, arguments = write_recipe("grpo", "killed", **longer)
    for name, moment in MOMENTS.items():
        if engine == "torch" or name in LOOP:
            process = Fork(killed_run, ["fit", *arguments, *resume_if_saved(run)], *moment)
            output = process.communicate()
            assert process.returncode == -signal.SIGKILL, f"{name}: {output}"
    assert main(["fit", *arguments, *resume_if_saved(run)]) == 0
    assert_same_bits(run, straight)
