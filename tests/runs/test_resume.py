"""A run that is stopped anywhere and resumed equals an uninterrupted one: bits, rows, counters."""

import csv
import json
import re
import signal
import time

import pytest
from safetensors.torch import load_file

from lmmods.cli import main
from lmmods.runs.folder import RunFolder
from tests.finished_runs import assert_same_run, rows
from tests.forks import Fork, together, train

# 32 training rows: 8 micro-batches an epoch, in steps of 3, 3 and 2; validation every 4 steps; 6 steps are two epochs.
EVERYWHERE = {"trainer__accumulate_grad_batches": 3, "trainer__gradient_clip_val": 0.5}


@pytest.mark.parametrize("changes", [
    pytest.param(EVERYWHERE, id="qlora", marks=pytest.mark.slow),
    pytest.param({**EVERYWHERE, "data__init_args__group_by_length": True, "trainer__val_check_interval": 1.0,
                  "trainer__max_epochs": 2, "trainer__max_steps": -1, "model__init_args__quantize": None,
                  "model__init_args__lora": None}, id="full_epochs_grouped", marks=pytest.mark.slow),
    pytest.param({**EVERYWHERE, "model__init_args__optimizer": {"name": "adamw_8bit", "lr": 0.01},
                  "data__init_args__num_workers": 1, "trainer__limit_val_batches": 0}, id="8bit_workers",
                 marks=pytest.mark.slow),
    pytest.param({**EVERYWHERE, "data__init_args__streaming": True, "data__init_args__stream_window": 16,
                  "data__init_args__val_size": 0, "trainer__limit_val_batches": 0}, id="streaming",
                 marks=pytest.mark.slow),
    pytest.param({**EVERYWHERE, "data__init_args__packing": True, "trainer__limit_val_batches": 0,
                  "model__init_args__optimizer": {"name": "muon", "lr": 1e-3, "b_lr_ratio": 4.0, "layer_decay": 0.8,
                                                  "ema_decay": 0.9},
                  "model__init_args__neftune_alpha": 5.0, "model__init_args__label_smoothing": 0.1,
                  "model__init_args__z_loss": 1e-3}, id="muon_noise_packing", marks=pytest.mark.slow),
])
def test_a_run_interrupted_at_every_micro_batch_ends_with_the_same_bits(recipe, finished, tmp_path, stop_at, changes):
    """Twice in the first step, then everywhere within and between steps. An interrupted step is recomputed."""
    uninterrupted = finished(**changes)
    interrupted = RunFolder(tmp_path / "broken")
    arguments, steps = recipe(**changes, trainer__default_root_dir=str(interrupted.root)), []
    # Micro-batches after which the process is interrupted; 3 end a step, but for the third step of an epoch.
    for batches in (1, 2, 3, 1, 4, 2, 2, 4):
        stop_at(batches)
        assert main(["fit", *arguments, *(["--ckpt_path", "last"] if steps else [])]) == 130, steps
        assert not interrupted.completed.exists()
        steps.append(interrupted.find("last").name)
    assert changes != EVERYWHERE or steps == [f"step={step}" for step in (0, 0, 1, 1, 2, 3, 3, 4)]
    stop_at(0)
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert_same_run(uninterrupted, interrupted)


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(5, 6), (8, 3), (8, 8)])
def test_a_run_resumed_twice_has_the_same_bits(recipe, finished, tmp_path, stop_at, stops):
    """In the middle of an epoch, and at its end, where Lightning's own bookkeeping is weakest."""
    changes = {**EVERYWHERE, "trainer__max_steps": -1, "trainer__max_epochs": 3, "trainer__limit_val_batches": 0}
    uninterrupted, interrupted = finished(**changes), RunFolder(tmp_path / "broken")
    arguments = recipe(**changes, trainer__default_root_dir=str(interrupted.root))
    stop_at(stops[0])
    assert main(["fit", *arguments]) == 130
    stop_at(stops[1])
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 130
    stop_at(0)
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert_same_run(uninterrupted, interrupted)


# Another batch split -------------------------------------------------------------------------------------------------

# 33 rows: 5 steps per epoch, the last with one row. SGD keeps rounding differences as small as those of the gradients.
RESPLIT = {"trainer__max_steps": 8, "trainer__val_check_interval": 3, "data__init_args__val_size": 3,
           "data__init_args__eval_batch_size": 3, "model__init_args__quantize": None, "model__init_args__lora": None,
           "model__init_args__optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}
STREAM = {"data__init_args__streaming": True, "data__init_args__stream_window": 13, "data__init_args__val_size": 0}
NOT_COMPARED = {"train/tokens_per_second"}


def split_step(batch_size: int, accumulated: int, **changes) -> dict:
    return {**RESPLIT, **changes, "data__init_args__batch_size": batch_size,
            "trainer__accumulate_grad_batches": accumulated}


def assert_same_steps(run: RunFolder, other: RunFolder) -> None:
    """Assert that both runs logged the same steps, validations too, with the same numbers up to rounding."""
    logged, expected = rows(run, NOT_COMPARED), rows(other, NOT_COMPARED)
    assert [(row["step"], *row) for row in logged] == [(row["step"], *row) for row in expected]
    for row, expected_row in zip(logged, expected, strict=True):
        assert row["train/tokens"] == expected_row["train/tokens"]
        assert row == pytest.approx(expected_row, rel=1e-5, abs=1e-9)  # fractions of a stream's endless epoch


GROUPED = {"data__init_args__group_by_length": True}


@pytest.mark.parametrize(("engine", "changes"), [
    pytest.param("torch", {}, id="plain-torch"),
    pytest.param("jax", {}, id="plain-jax", marks=pytest.mark.slow),
    # The data module chooses the rows of a step, on either engine.
    pytest.param("torch", {**GROUPED, "trainer__val_check_interval": 0.4}, id="grouped", marks=pytest.mark.slow),
    pytest.param("jax", {"data__init_args__packing": True}, id="packing", marks=pytest.mark.slow),
    pytest.param("torch", STREAM, id="streaming", marks=pytest.mark.slow),
    pytest.param("jax", {**STREAM, **GROUPED}, id="streaming-grouped", marks=pytest.mark.slow)])
def test_a_run_resumes_with_another_batch_split(recipe, finished, tmp_path, instructions, engine, changes, capfd):
    """Inside an epoch, then across its end: 8 rows at once, 2 × 4, and 4 × 2 with the other engine."""
    changes = {"engine": engine, **changes}
    if "data__init_args__streaming" in changes:
        changes["data__init_args__val_source"] = str(instructions)
    uninterrupted, run = finished(**split_step(8, 1, **changes)), RunFolder(tmp_path / "run")
    root = {"trainer__default_root_dir": str(run.root)}
    assert main(["fit", *recipe(**split_step(8, 1, **changes), **root), "--stop_at", "2"]) == 0
    capfd.readouterr()
    assert main(["fit", *recipe(**split_step(2, 4, **changes), **root), "--ckpt_path", "last", "--stop_at", "6"]) == 0
    output = capfd.readouterr().out
    for line in (r"data\.batch_size +8 +2", r"trainer\.accumulate_grad_batches +1 +4"):
        assert re.search(line, output.split("Changed since that checkpoint")[1])
    changes["engine"] = "jax" if engine == "torch" and changes.keys() != {"engine"} else "torch"
    assert main(["fit", *recipe(**split_step(4, 2, **changes), **root), "--ckpt_path", "last"]) == 0
    assert_same_steps(run, uninterrupted)
    changed = [json.loads(line)["changed"] for line in run.resumes.read_text().splitlines()]
    assert [change["data.batch_size"] for change in changed] == [[8, 2], [2, 4]]


@pytest.mark.parametrize(("size", "batches", "first"), [
    (1, 2, "step=0"), pytest.param(4, 10, "step=5", marks=pytest.mark.slow)])
def test_an_interrupted_step_is_recomputed_with_another_batch_split(recipe, finished, tmp_path, stop_at, size, batches,
                                                                    first):
    """In the first step, and in the second epoch."""
    uninterrupted, run = finished(**split_step(8, 1, engine="torch")), RunFolder(tmp_path / "run")
    root = {"trainer__default_root_dir": str(run.root)}
    stop_at(batches)
    assert main(["fit", *recipe(**split_step(size, 8 // size), **root)]) == 130 and run.find("last").name == first
    stop_at(2)
    assert main(["fit", *recipe(**split_step(2, 4), **root), "--ckpt_path", "last"]) == 130
    assert run.find("last").name == first
    stop_at(0)
    assert main(["fit", *recipe(**split_step(1, 8), **root), "--ckpt_path", "last"]) == 0
    assert_same_steps(run, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("changes", [GROUPED, STREAM], ids=["grouped", "streaming"])
def test_two_processes_resume_with_another_batch_split(recipe, finished, tmp_path, instructions, engine, changes):
    """8 rows at once, 2 processes × 2 × 2, then one process again."""
    changes = {"engine": engine, **changes, "data__init_args__val_source": str(instructions),
               "data__init_args__val_size": 0}
    uninterrupted, run = finished(**split_step(8, 1, **changes)), RunFolder(tmp_path / "run")
    root = {"trainer__default_root_dir": str(run.root)}
    assert main(["fit", *recipe(**split_step(8, 1, **changes), **root), "--stop_at", "2"]) == 0
    two = recipe("two.yaml", **split_step(2, 2, **changes), **root, trainer__strategy="ddp",
                 trainer__devices=2 if engine == "torch" else 1)
    together(["fit", *two, "--ckpt_path", "last", "--stop_at", "7"], 1 if engine == "torch" else 2)
    assert main(["fit", *recipe(**split_step(1, 8, **changes), **root), "--ckpt_path", "last"]) == 0
    assert_same_steps(run, uninterrupted)


@pytest.mark.slow
def test_a_longer_run_resumes_from_the_end_of_a_shorter_one(recipe, tmp_path):
    constant = {"model__init_args__optimizer": {"lr": 0.01}, "trainer__limit_val_batches": 0}
    uninterrupted, extended = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "grown")
    assert main(["fit", *recipe(**constant, trainer__default_root_dir=str(uninterrupted.root))]) == 0
    assert main(["fit", *recipe(**constant, trainer__default_root_dir=str(extended.root), trainer__max_steps=3)]) == 0
    arguments = recipe(**constant, trainer__default_root_dir=str(extended.root))
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert_same_run(uninterrupted, extended)


def test_a_checkpoint_of_an_adapter_contains_no_base_weights(finished):
    folder = finished()
    saved = load_file(folder.resolve("last") / "model.safetensors")
    assert saved and all("lora_" in name for name in saved)
    size = sum(tensor.numel() * 4 for tensor in saved.values())
    assert (folder.resolve("last") / "model.safetensors").stat().st_size < 2 * size


def test_the_last_and_the_best_checkpoints_are_kept(recipe, tmp_path):
    run = RunFolder(tmp_path / "run")
    assert main(["fit", *recipe(checkpoint={"every_n_steps": 1, "keep_last": 2, "keep_best": 1})]) == 0
    best = run.resolve("best").name
    assert set(run.names()) == {"step=5", "step=6", best}
    with open(run.metrics_csv) as file:
        losses = {row["step"]: float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]}
    assert best == f"step={min(losses, key=losses.get)}"


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_signal_saves_a_checkpoint_and_exits_with_130(recipe, tmp_path, signal_number):
    folder = RunFolder(tmp_path / "run")
    arguments = recipe(**EVERYWHERE, trainer__default_root_dir=str(folder.root), trainer__max_steps=100000)
    process = Fork(train, "fit", *arguments)
    deadline = time.monotonic() + 120
    while not folder.names() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal_number)
    output = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Interrupted at step" in output and "--ckpt_path last" in output and "Traceback" not in output
    assert f"{folder.resolve('last')}" in output.replace(str(folder.checkpoints), str(folder.checkpoints.resolve()))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_resumed_run_follows_the_schedule_of_its_new_recipe(recipe, tmp_path, engine):
    """With more steps and another learning rate, the new schedule applies from the next step."""
    changes = {"engine": engine, "model__init_args__quantize": None, "model__init_args__lora": {"rank": 2, "alpha": 4}}
    settings = {"lr": 0.01, "schedule": "linear", "warmup": 0}
    assert main(["fit", *recipe(**changes, trainer__max_steps=4, model__init_args__optimizer=settings)]) == 0
    settings["lr"] = 0.02
    assert main(["fit", *recipe(**changes, trainer__max_steps=8, model__init_args__optimizer=settings),
                 "--ckpt_path", "last"]) == 0
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        lr = [float(row["train/lr"]) for row in csv.DictReader(file)]
    assert lr[:4] == pytest.approx([0.01 * (1 - step / 4) for step in range(4)])
    assert lr[4:] == pytest.approx([0.02 * (1 - step / 8) for step in range(4, 8)])


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_validate_without_a_validation_set_is_an_error(recipe, engine, capfd):
    arguments = recipe(engine=engine, model__init_args__quantize=None, data__init_args__val_size=0)
    assert main(["validate", *arguments]) == 2
    assert "There is no validation set" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_config_overrides_change_only_known_fields_of_a_pretrained_configuration(recipe, tmp_path, engine, capfd):
    changes = {"engine": engine, "model__init_args__quantize": None, "model__init_args__lora": None,
               "trainer__max_steps": 1}
    assert main(["fit", *recipe(**changes, model__init_args__config_overrides={"rms_norm_eps": 0.5})]) == 0
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["rms_norm_eps"] == 0.5
    assert main(["fit", *recipe(**changes, model__init_args__config_overrides={"nonsense": 1}),
                 "--overwrite", "true"]) == 2
    assert "has no field 'nonsense'" in capfd.readouterr().err
