"""The JAX trainer from the command line: exact resume, any number of devices and processes, files, errors."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from jax_engine.models.network import Network
from jax_engine.trainer import Loop
from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from tests.finished_runs import TIMED, assert_same_checkpoint, assert_same_run, rows
from tests.forks import Fork, together, train
from tests.interruptions import stop_jax_at

ROOT = Path(__file__).parent.parent.parent
FULL = {"model__init_args__quantize": None, "model__init_args__lora": None}
COMMON = {"engine": "jax", "trainer__accumulate_grad_batches": 3, "trainer__gradient_clip_val": 0.5}
# Batches of two lengths, 96 and 192, for each of which JAX compiles all programs of a step. Otherwise of one.
TWO_LENGTHS = {"data__init_args__pad_to_multiple_of": 48}


@pytest.fixture
def jax_recipe(recipe, tmp_path):
    """Return a function that writes a JAX recipe with its own run folder: QLoRA with dropout on a Llama."""
    def write(folder: str, **changes) -> tuple[RunFolder, list[str]]:
        run = RunFolder(tmp_path / folder)
        return run, recipe(f"{folder}.yaml", **{**COMMON, "trainer__default_root_dir": str(run.root), **changes})

    return write


@pytest.fixture
def stop_at(monkeypatch):
    """Interrupt a process in its n-th micro-batch, like Ctrl+C; 0 lets it run to the end."""
    return stop_jax_at(monkeypatch)


def interrupt_and_resume(run: RunFolder, arguments: list[str], stop_at, *num_batches: int) -> None:
    """Interrupt a run in a micro-batch, resume it, interrupt it again ..., and let it end."""
    for batches in num_batches:
        stop_at(batches)
        assert main(["fit", *arguments, *(["--ckpt_path", "last"] if run.root.exists() else [])]) == 130, batches
        assert not run.completed.exists()
    stop_at(0)
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "stops"), [
    ({}, (1, 4, 4, 3)),
    ({**FULL, **TWO_LENGTHS, "data__init_args__group_by_length": True, "trainer__val_check_interval": 1.0,
      "trainer__max_epochs": 2, "trainer__max_steps": -1}, (2, 8)),
    ({"data__init_args__packing": True, "trainer__limit_val_batches": 0}, (2,)),
    ({"data__init_args__streaming": True, "data__init_args__stream_window": 16, "data__init_args__val_size": 0}, (5,)),
], ids=["qlora", "full_epochs_grouped", "packing", "streaming"])
def test_an_interrupted_run_resumes_with_the_same_bits(jax_recipe, stop_at, changes, stops):
    straight, arguments = jax_recipe("straight", **changes)
    assert main(["fit", *arguments]) == 0
    broken, arguments = jax_recipe("broken", **changes)
    interrupt_and_resume(broken, arguments, stop_at, *stops)
    assert_same_run(straight, broken)


@pytest.mark.slow
def test_a_kto_run_interrupted_inside_a_step_resumes_with_the_same_bits(jax_recipe, stop_at, tmp_path):
    """The baseline of a KTO step depends on all its rows, also after a resume."""
    source = tmp_path / "labelled.jsonl"
    source.write_text("".join(json.dumps({
        "prompt": f"Count from {n}.", "completion": f"{n} and " * (n % 3 + 1), "label": n % 2 == 0}) + "\n"
        for n in range(30)))
    changes = {"model__class_path": "Preference", "model__init_args__loss": "kto", "data__class_path": "PreferenceData",
               "data__init_args__source": str(source), "model__init_args__quantize": None,
               "trainer__limit_val_batches": 0, "trainer__max_steps": 4}
    straight, arguments = jax_recipe("straight", **changes)
    assert main(["fit", *arguments]) == 0
    assert any(row["train/kl"] for row in rows(straight))
    broken, arguments = jax_recipe("broken", **changes)
    interrupt_and_resume(broken, arguments, stop_at, 5)
    assert_same_run(straight, broken)


@pytest.mark.slow
def test_a_grpo_run_interrupted_inside_a_step_resumes_with_its_rollouts(jax_recipe, stop_at, tmp_path):
    """Rollouts of two steps with two micro-batches each, used twice; a resumed run reads the sampled answers."""
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"instruction": f"Count from {n}.", "input": "", "output": f"{n}"}) + "\n"
                              for n in range(10)))
    changes = {"model__class_path": "GRPO", "model__init_args__rewards": [{"name": "regex", "pattern": "[a-m]"}],
               "model__init_args__num_generations": 4, "model__init_args__max_new_tokens": 5,
               "model__init_args__steps_per_rollout": 2, "model__init_args__num_iterations": 2,
               "data__class_path": "PromptData", "data__init_args__source": str(source),
               "data__init_args__batch_size": 4, "data__init_args__val_size": 0, "trainer__limit_val_batches": 0,
               "trainer__accumulate_grad_batches": 2, "trainer__max_steps": 6}
    timed = TIMED | {f"train/seconds/{name}" for name in ("drawing", "rewards", "scoring", "all")}
    straight, arguments = jax_recipe("straight", **changes)
    assert main(["fit", *arguments]) == 0
    assert [path.name for path in sorted(straight.rollouts.glob("*.jsonl"))] == ["step=0.jsonl", "step=4.jsonl"]
    broken, arguments = jax_recipe("broken", **changes)
    interrupt_and_resume(broken, arguments, stop_at, 4, 5)
    for path in straight.rollouts.iterdir():
        assert path.read_bytes() == (broken.rollouts / path.name).read_bytes()
    assert rows(broken, timed) == rows(straight, timed)
    assert_same_checkpoint(straight, broken)


@pytest.mark.slow
def test_on_policy_distillation_resumes_inside_a_step_and_runs_on_two_processes(jax_recipe, stop_at, llama_of):
    changes = {"model__init_args__config_overrides": {"attention_dropout": 0.0},
               "model__init_args__teacher": {"pretrained": str(llama_of(2)), "on_policy": 0.5, "max_new_tokens": 7},
               "data__init_args__batch_size": 2, "trainer__accumulate_grad_batches": 2,
               "trainer__val_check_interval": 8, "trainer__max_steps": 4}
    straight, arguments = jax_recipe("straight", **changes)
    assert main(["fit", *arguments]) == 0
    broken, arguments = jax_recipe("broken", **changes)
    interrupt_and_resume(broken, arguments, stop_at, 5)
    assert_same_run(straight, broken)
    two, arguments = jax_recipe("two", trainer__strategy="ddp", **changes | {"trainer__accumulate_grad_batches": 1})
    together(["fit", *arguments], 2)
    timed = TIMED | {"train/epoch"}
    assert any(0 < row["train/drawn"] < 1 for row in rows(two))
    for row, expected in zip(rows(two, timed), rows(straight, timed), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)


MESH = "jax_engine.distributed.devices.MeshSharding"


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "strategy", "num_ranks", "changes"), [
    (4, "ddp", 4, FULL), (8, {"class_path": MESH, "init_args": {"data": 2, "fsdp": 2, "tensor": 2}}, 4, {}),
], ids=["ddp4-full", "mesh2x2x2-qlora"])
def test_any_number_of_devices_takes_the_same_steps(jax_recipe, finished, devices, strategy, num_ranks, changes):
    """A step of 4 micro-batches, on one or several devices, with dropout; the epoch ends with an incomplete step."""
    common = {**changes, "data__init_args__batch_size": 3, "trainer__max_steps": 6}
    single = finished(**{**COMMON, **common, "trainer__accumulate_grad_batches": 4, "trainer__val_check_interval": 6})
    many, arguments = jax_recipe("many", **common, trainer__devices=devices, trainer__strategy=strategy,
                                 trainer__accumulate_grad_batches=4 // num_ranks, trainer__val_check_interval=6)
    assert main(["fit", *arguments]) == 0
    for row, expected in zip(rows(many, TIMED | {"train/epoch"}), rows(single, TIMED | {"train/epoch"}), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    for name, weight in load_file(many.resolve("last") / "model.safetensors").items():
        expected = load_file(single.resolve("last") / "model.safetensors")[name]
        torch.testing.assert_close(torch.from_numpy(weight), torch.from_numpy(expected), rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_several_devices_compute_the_reference_log_probs_of_one(jax_recipe, tmp_path):
    """Seven rows on two devices with micro-batches of three; KTO also needs the log-probs of other prompts' answers."""
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps({
        "prompt": f"Count from {n}.", "chosen": f"{n} and " * (n % 3 + 1), "rejected": "none " * (n % 4 + 1)}) + "\n"
        for n in range(7)))
    common = {**FULL, "model__class_path": "Preference", "model__init_args__loss": "kto",
              "model__init_args__reference": "cache", "model__init_args__optimizer": {"name": "sgd", "lr": 0.01},
              "data__class_path": "PreferenceData", "data__init_args__source": str(source),
              "data__init_args__batch_size": 3,
              "data__init_args__eval_batch_size": 3, "data__init_args__val_size": 0, "trainer__max_steps": 3}
    mesh = {"class_path": MESH, "init_args": {"data": 1, "fsdp": 2, "tensor": 2}}
    results = []
    for name, (batches, devices, strategy) in {"one": (2, 1, "ddp"), "replicas": (1, 2, "ddp"),
                                               "mesh": (1, 4, mesh)}.items():
        devices = {"trainer__accumulate_grad_batches": batches, "trainer__devices": devices,
                   "trainer__strategy": strategy}
        run, arguments = jax_recipe(name, **common, **devices, data__init_args__cache_dir=str(tmp_path / f"c-{name}"))
        assert main(["fit", *arguments]) == 0
        logps, = (tmp_path / f"c-{name}").glob("reference-*/logps.npy")
        results.append((rows(run, TIMED | {"train/epoch"}), np.load(logps)))
    (single, expected), *others = results
    assert expected.min() < 0
    for many, logps in others:
        assert logps == pytest.approx(expected, rel=1e-5)
        for row, single_row in zip(many, single, strict=True):
            assert row == pytest.approx(single_row, rel=1e-5, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_moves_between_one_and_two_processes_with_the_same_steps(jax_recipe, finished, strategy):
    common = {"data__init_args__batch_size": 3, "trainer__max_steps": 6,
              "checkpoint": {"every_n_steps": 3, "keep_last": 9}}
    single = finished(**{**COMMON, **common, "trainer__accumulate_grad_batches": 2, "trainer__val_check_interval": 6})
    two, for_two = jax_recipe("two", **common, trainer__accumulate_grad_batches=1, trainer__strategy=strategy,
                              trainer__val_check_interval=6, trainer__devices=1)
    outputs = together(["fit", *for_two], 2)
    assert sum("Parameters:" in text for text in outputs) == 1
    assert len(list(two.resolve("last").glob("*-of-00002.safetensors"))) == 4  # both wrote weights and moments
    untimed = TIMED | {"train/epoch"}
    for row, expected in zip(rows(two, untimed), rows(single, untimed), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    _, for_one = jax_recipe("two", **common, trainer__accumulate_grad_batches=2, trainer__val_check_interval=6)
    assert main(["fit", *for_one, "--ckpt_path", "3", "--overwrite", "true"]) == 0
    for row, expected in zip(rows(two, untimed), rows(single, untimed), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    _, for_two = jax_recipe("two", **common, trainer__accumulate_grad_batches=1, trainer__strategy=strategy,
                            trainer__val_check_interval=6, trainer__devices=1)
    together(["fit", *for_two, "--ckpt_path", "3", "--overwrite", "true"], 2)
    for row, expected in zip(rows(two, untimed), rows(single, untimed), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_several_devices_resume_inside_a_step(jax_recipe, stop_at):
    """After four of its eight rows, in the second epoch; one device then resumes inside the next step."""
    common = {**FULL, "trainer__max_steps": 8,
              "model__init_args__optimizer": {"name": "sgd", "lr": 0.1}, "data__init_args__eval_batch_size": 4}
    straight, arguments = jax_recipe("straight", **common, data__init_args__batch_size=8,
                                     trainer__accumulate_grad_batches=1)
    assert main(["fit", *arguments]) == 0
    single = {"data__init_args__batch_size": 2, "trainer__accumulate_grad_batches": 4}
    run, arguments = jax_recipe("run", **common, **single)
    stop_at(18)
    assert main(["fit", *arguments]) == 130 and run.find("last").name == "step=4"
    _, arguments = jax_recipe("run", **common, data__init_args__batch_size=1, trainer__accumulate_grad_batches=2,
                              trainer__devices=4, trainer__strategy="ddp")
    stop_at(4)
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 130 and run.find("last").name == "step=5"
    _, arguments = jax_recipe("run", **common, **single)
    stop_at(0)
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    for row, expected in zip(rows(run, TIMED | {"train/epoch"}), rows(straight, TIMED | {"train/epoch"}), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


def test_the_run_folder_has_the_files_of_the_torch_engine(jax_recipe):
    run, arguments = jax_recipe("run", **FULL, trainer__max_steps=4)
    assert main(["fit", *arguments]) == 0
    assert {"config.yaml", "data_report.json", "metrics.csv", "metrics.json", "checkpoints", "model", "loss.png",
            "completed"} <= {path.name for path in run.root.iterdir()}
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.model)
    saved = load_file(run.resolve("last") / "model.safetensors")
    assert all(torch.equal(tensor, torch.from_numpy(saved[f"model.{name}"]))
               for name, tensor in model.state_dict().items())
    assert main(["validate", "--config", str(run.config), "--ckpt_path", "last"]) == 0
    assert main(["fit", *arguments]) == 2  # a finished run is not overwritten


def test_a_start_builds_the_network_once(jax_recipe, monkeypatch):
    """In a new and a resumed run, with an adapter and rows for a new token, which change the network in place."""
    built, build = [], Network.__init__
    monkeypatch.setattr(Network, "__init__", lambda self, *args, **kwargs: built.append(1) or build(self, *args,
                                                                                                    **kwargs))
    _, arguments = jax_recipe("run", trainer__max_steps=2, trainer__limit_val_batches=0,
                              data__init_args__add_tokens=["<new>"])
    assert main(["fit", *arguments, "--stop_at", "1"]) == 0 and len(built) == 1
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0 and len(built) == 2


def test_early_stopping_ends_the_run(jax_recipe):
    run, arguments = jax_recipe("run", trainer__max_steps=40, trainer__val_check_interval=1, trainer__callbacks=[
        {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "patience": 2, "min_delta": 100.0}}])
    assert main(["fit", *arguments]) == 0
    assert json.loads(run.metrics_json.read_text())["trainer/global_step"] == 3  # the first is the best, then two more
    assert run.completed.exists()


@pytest.mark.slow
def test_a_run_may_end_within_an_epoch(jax_recipe):
    """32 rows in batches of 4, 2 per step: 4 steps per epoch, and the schedule ends with the run."""
    run, arguments = jax_recipe("run", trainer__max_epochs=1.5, trainer__max_steps=-1,
                                trainer__accumulate_grad_batches=2, model__init_args__optimizer={
                                    "lr": 0.01, "schedule": "linear"})
    assert main(["fit", *arguments]) == 0
    lr = [row["train/lr"] for row in rows(run)]
    assert lr == pytest.approx([0.01 * (1 - step / 6) for step in range(6)])


@pytest.mark.parametrize(("changes", "message"), [
    ({"trainer__devices": 64}, "trainer.devices is 64, but this machine has"),
    ({"trainer__strategy": {"class_path": MESH, "init_args": {"data": 3, "fsdp": 1, "tensor": 1}}}, "strategy: mesh"),
    ({"trainer__enable_model_summary": True}, "enable_model_summary"),
    ({"model__init_args__lora": None}, "model.quantize is nf4, but quantised weights cannot be trained"),
    ({"model__init_args__lora": {"modules_to_save": ["q_proj"], "targets": ["v_proj"]}}, "q_proj is stored in nf4"),
    ({"model__init_args__optimizer": {"name": "paged_adamw_8bit"}}, "adamw"),
    ({"trainer__precision": "16-mixed"}, "precision"),
    ({"trainer__max_steps": -1}, "trainer.max_steps or trainer.max_epochs is missing"),
    ({"model__init_args__generation": {"penalty_alpha": 0.6}, "command": "predict"}, "generation.penalty_alpha is 0.6"),
    ({"trainer__val_check_interval": 1.5}, "val_check_interval is 1.5"),
])
def test_an_error_is_one_message_and_creates_no_run_folder(jax_recipe, capfd, changes, message):
    command = changes.pop("command", "fit")
    run, arguments = jax_recipe("run", **changes)
    assert main([command, *arguments]) == 2
    errors = capfd.readouterr().err
    assert message in errors and "Traceback" not in errors
    assert not run.root.exists()


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_and_exits_with_130(jax_recipe):
    run, arguments = jax_recipe("run", trainer__max_steps=100000, trainer__limit_val_batches=0)
    process = Fork(train, "fit", *arguments)
    while not run.metrics_csv.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)
    assert process.returncode == 130 and "--ckpt_path last" in output and "Traceback" not in output
    assert run.find("last") is not None


@pytest.mark.slow
def test_no_step_waits_for_the_device(jax_recipe, monkeypatch):
    """Nothing is fetched from the devices between two logged steps."""
    import jax

    fetched, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: fetched.append(1) or get(tree))
    _, arguments = jax_recipe("run", trainer__log_every_n_steps=3, trainer__max_steps=9, checkpoint={
        "every_n_steps": None}, trainer__limit_val_batches=0)
    train_step = Loop.train_step

    def train_step_guarded(loop, *batches):
        before = len(fetched)
        step = loop.run.progress.step
        with jax.transfer_guard_device_to_host("allow" if step == 8 or step % 3 == 0 else "disallow"):
            train_step(loop, *batches)
        assert len(fetched) == before or step == 8 or loop.run.progress.step % 3 == 1

    monkeypatch.setattr(Loop, "train_step", train_step_guarded)
    assert main(["fit", *arguments]) == 0
    assert fetched
