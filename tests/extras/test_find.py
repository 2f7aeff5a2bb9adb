"""`find`: the range test, the search for a batch size, and the lines of a recipe that it prints."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.core.settings import Optimizer
from lmmods.extras import find as find_command
from lmmods.extras.dry_run import dry_run
from lmmods.extras.find import DIVERGENCE, SMOOTHING, Measurement, RangeTest, Sizes, choose_best, print_changes, search

# The range test -----------------------------------------------------------------------------------------------------


def run_range_test(losses: list[float], num_steps: int = 100) -> RangeTest:
    """Return a range test run on these losses."""
    test = RangeTest(1e-6, 1.0, num_steps)
    ramp = test.ramp(Optimizer(name="sgd", lr=0.5, momentum=0.9, warmup=7))
    assert (ramp.name, ramp.momentum) == ("sgd", 0.9)
    for step, loss in enumerate(losses):
        if test.add({"lr": ramp.lr_at(step, num_steps), "loss": loss}):
            break
    return test


def test_the_learning_rate_rises_by_a_constant_factor():
    test = run_range_test([1.0] * 100)
    assert np.allclose(test.rates, np.geomspace(1e-6, 1, 100), rtol=1e-12)


def test_the_suggested_rate_is_where_the_noisy_loss_falls_fastest():
    """Test a logistic loss curve, steepest at step 60."""
    noise = np.random.default_rng(0).normal(0, 0.3, 100)
    losses = 3 - 2 / (1 + np.exp(-(np.arange(100) - 60) / 5)) + noise
    test = run_range_test(losses.tolist())
    slopes = {centre: np.polyfit(np.arange(25), losses[centre - 12 : centre + 13], 1)[0] for centre in range(12, 88)}
    least = int(np.argmin(test.smoothed))
    expected = min((centre for centre in slopes if centre <= least), key=slopes.get)
    assert test.suggest_lr() == pytest.approx(test.rates[expected], rel=0.05) and abs(expected - 60) <= 4


def test_the_range_test_stops_when_the_smoothed_loss_diverges():
    losses = [2.0] * 30 + [3.0 * 2**step for step in range(40)]
    test = run_range_test(losses)
    mean, smoothed = 0.0, []
    for count, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smoothed.append(mean / (1 - SMOOTHING**count))
        if smoothed[-1] > DIVERGENCE * min(smoothed):
            break
    assert test.has_diverged and test.smoothed == pytest.approx(smoothed) and 30 < len(smoothed) < 50


@pytest.mark.parametrize(("losses", "message"), [
    ([2.0] * 10 + [math.nan], "too early"), ([2.0] * 5 + [1e9], "too early"),
    (np.random.default_rng(1).normal(2, 0.3, 100).tolist(), "does not fall clearly|too early"),
    (np.linspace(2, 3, 100).tolist(), "too early")])
def test_a_loss_that_suggests_no_rate_is_an_error(losses, message):
    with pytest.raises(UserError, match=message):
        run_range_test(losses).suggest_lr()


@pytest.mark.parametrize("settings", [(0.0, 1.0, 100), (1.0, 1e-3, 100), (1e-7, 1.0, 5)])
def test_an_invalid_range_of_rates_is_rejected(settings):
    with pytest.raises(UserError, match="but must be"):
        RangeTest(*settings)


# Batch sizes --------------------------------------------------------------------------------------------------------


def fake_measure(speed, max_size: int = 10**9):
    """Return a simulated measure function and the list of sizes it measures; larger sizes than max_size do not fit."""
    measured_sizes = []

    def measure(size: int) -> Measurement:
        measured_sizes.append(size)
        return Measurement(size, speed(size)) if size <= max_size else Measurement(size, problem="out of memory")

    return measure, measured_sizes


@pytest.mark.parametrize(("current_size", "speed", "max_size", "expected_sizes", "expected"), [
    (4, lambda size: size, 10**9, [4, 8, 16, 32, 64], 64),  # faster and faster: all rows of a step
    (4, lambda size: min(size, 16), 10**9, [4, 8, 16, 32], 16),  # 32 is no faster
    (4, lambda size: size, 16, [4, 8, 16, 32], 16),  # 32 does not fit
    (16, lambda size: size, 3, [16, 8, 4, 2], 2),
    (4, lambda size: 5.0, 10**9, [4, 8], 4)])
def test_the_fastest_size_that_fits_is_found(current_size, speed, max_size, expected_sizes, expected):
    measure, measured_sizes = fake_measure(speed, max_size)
    measurements = search([1, 2, 4, 8, 16, 32, 64], current_size, measure)
    assert measured_sizes == expected_sizes and choose_best(measurements).batch_size == expected


def test_the_search_continues_between_the_largest_fit_and_the_smallest_failure():
    measure, measured_sizes = fake_measure(lambda size: size, 24)
    assert choose_best(search([1, 2, 3, 4, 6, 8, 12, 16, 24, 48], 4, measure)).batch_size == 24
    assert measured_sizes[:4] == [4, 8, 16, 48] and measured_sizes[4:] == [24]


def test_a_model_that_fits_no_batch_is_an_error():
    measure, _ = fake_measure(lambda size: size, 0)
    with pytest.raises(UserError, match="Not even a batch of 1 fits"):
        choose_best(search([1, 2, 4], 4, measure))


def make_sizes(trainer: dict, **data) -> Sizes:
    return Sizes({"trainer": {"accumulate_grad_batches": 1, **trainer},
                  "data": {"init_args": {"batch_size": 4, "eval_batch_size": None, **data}}})


def test_candidate_sizes_keep_the_rows_of_a_step_and_the_limits():
    assert make_sizes({"accumulate_grad_batches": 3}).candidates() == [1, 2, 3, 4, 6, 12]
    limited = make_sizes({"accumulate_grad_batches": 4, "limit_train_batches": 6, "limit_val_batches": 3})
    assert limited.candidates() == [1, 2, 4, 8]  # 16 rows would end the epoch in the middle of a micro-batch
    assert limited.changes(4) == {} and limited.changes(8) == {
        "data.init_args.batch_size": 8, "trainer.accumulate_grad_batches": 2, "trainer.limit_train_batches": 3,
        "data.init_args.eval_batch_size": 4}
    assert "data.init_args.eval_batch_size" not in make_sizes({"accumulate_grad_batches": 4}).changes(8)


def test_a_process_above_the_memory_limit_is_killed_with_its_children(monkeypatch, tmp_path):
    hungry = "import time; memory = bytes(1) * 2**28; time.sleep(9)"
    hungry = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{hungry}'])"
    monkeypatch.setattr("lmmods.commands.programs.command", lambda arguments: [sys.executable, "-c", hungry])
    status, peak = find_command._run_with_limit([], tmp_path / "log", 0.2)
    assert status == -9 and peak > 0.2


# Lines of a recipe ---------------------------------------------------------------------------------------------------


def test_the_printed_changes_are_valid_recipe_lines(capsys, tmp_path):
    print_changes({"data.init_args.batch_size": 8, "data.init_args.eval_batch_size": 4,
                   "trainer.accumulate_grad_batches": 2, "model.init_args.optimizer.lr": 3.2e-5})
    assert parse_changes(capsys.readouterr().out) == {
        "data": {"init_args": {"batch_size": 8, "eval_batch_size": 4}}, "trainer": {"accumulate_grad_batches": 2},
        "model": {"init_args": {"optimizer": {"lr": 3.2e-5}}}}


def parse_changes(out: str) -> dict:
    """Parse the recipe lines at the end of a command's output."""
    return yaml.safe_load(out.split("Set in the recipe:\n")[1])


# From end to end ----------------------------------------------------------------------------------------------------


@pytest.fixture
def find(recipe, tmp_path, monkeypatch, capsys):
    """Return a function that runs `find` on a tiny recipe and returns its result; it leaves only this and the plot."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, **changes) -> dict:
        arguments = recipe(**changes)
        before = {path.name for path in tmp_path.iterdir()}
        assert main(["find", *arguments, *words, "--result", "result.json"]) == 0, capsys.readouterr().err
        assert {path.name for path in tmp_path.iterdir()} - before <= {"result.json", "lr.png"}
        return json.loads(Path("result.json").read_text())

    return run


TEST = {"model__init_args__optimizer__lr": 0.5, "samples__prompts": ["Add 1 and 2."], "data__init_args__val_size": 0.2}


@pytest.fixture
def measured_tokens(monkeypatch) -> list[float]:
    """Return a list of the token counts of the steps measured by dry runs."""
    tokens = []

    def watch_dry_run(setup, watch):
        return dry_run(setup, lambda figures: (tokens.append(figures["num_tokens"]), watch(figures))[1])

    monkeypatch.setattr(find_command, "dry_run", watch_dry_run)
    return tokens


@pytest.mark.slow
def test_both_engines_suggest_the_same_learning_rate(find, tmp_path, capsys):
    words = "--what lr --steps 24 --min_lr 1e-4 --max_lr 3".split()
    torch = find(*words, **TEST)
    assert parse_changes(capsys.readouterr().out) == {"model": {"init_args": {"optimizer": {"lr": torch["lr"]}}}}
    assert len(torch["rates"]) > 15 and (tmp_path / "lr.png").exists()
    (tmp_path / "lr.png").unlink()
    jax = find(*words, engine="jax", **TEST)
    assert jax["lr"] == torch["lr"] and jax["rates"] == pytest.approx(torch["rates"], rel=1e-6)
    assert jax["losses"][:15] == pytest.approx(torch["losses"][:15], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_step_is_measured_on_the_longest_rows_first(find, engine, measured_tokens):
    step = find("--what", "step", engine=engine)
    assert step["tokens_per_second"] > 0 and step["memory"] > 0.1 and not step["on_device"]
    assert len(measured_tokens) == 4 and measured_tokens == sorted(measured_tokens, reverse=True)


GRPO = {"model__class_path": "GRPO", "model__init_args__rewards": [{"name": "exact_match"}],
        "model__init_args__num_generations": 2, "model__init_args__max_new_tokens": 8,
        "data__class_path": "PromptData"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_grpo_step_is_measured_without_generating_answers(find, engine, monkeypatch, measured_tokens):
    """Test that rows have the maximum length."""
    from lmmods.rollouts.maker import RolloutMaker

    monkeypatch.setattr(RolloutMaker, "make_or_read", None)
    assert find("--what", "step", engine=engine, **GRPO)["tokens_per_second"] > 0
    assert measured_tokens == [4 * 256] * 4


@pytest.mark.parametrize("what", ["lr", "both"])
def test_a_learning_rate_is_not_suggested_for_grpo(recipe, capsys, what):
    assert main(["find", *recipe(**GRPO), "--what", what]) == 2
    assert "the loss of GRPO does not fall" in (error := capsys.readouterr().err) and "val/reward" in error


@pytest.mark.parametrize(("failures", "expected"), [
    ({}, 16), ({16: (2, 0.5, "error: Out of memory (x)")}, 8), ({16: (-9, 0.5, "")}, 8), ({8: (-9, 50.0, "")}, 4)])
def test_the_batch_size_is_searched_in_separate_processes_and_printed(recipe, tmp_path, monkeypatch, capsys, failures,
                                                                      expected):
    """Each size has its own process; `failures` maps a size to exit status, GiB and output."""
    monkeypatch.setattr(find_command, "free_memory", lambda: 40.0)
    calls = []

    def fake_run(arguments, log, limit):
        options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
        size = int(options.get("--data.init_args.batch_size", 4))
        calls.append((size, options["--trainer.accumulate_grad_batches"], options["--what"]))
        status, gib, output = failures.get(size, (0, 0.5, ""))
        log.write_text(output)
        if status == 0:
            Path(options["--result"]).write_text(json.dumps(
                {"tokens_per_second": 100.0 * size, "memory": 0.4, "on_device": False}))
        return status, gib

    monkeypatch.setattr(find_command, "_run_with_limit", fake_run)
    arguments = recipe(trainer__accumulate_grad_batches=4, trainer__limit_train_batches=8)
    assert main(["find", *arguments, "--what", "batch_size"]) == 0, capsys.readouterr().err
    assert calls == [(4, "2", "step"), (8, "2", "step"), (16, "1", "step")][: len(calls)]
    assert f"Batch size {expected}: " in (out := capsys.readouterr().out) and not (tmp_path / "run").exists()
    if expected == 4:
        assert "Set in the recipe" not in out
    else:
        assert parse_changes(out) == {"data": {"init_args": {"batch_size": expected}}, "trainer": {
            "accumulate_grad_batches": 16 // expected, "limit_train_batches": 8 * 4 // expected}}


def test_a_step_that_fails_for_another_reason_ends_the_search(recipe, monkeypatch, capsys):
    monkeypatch.setattr(find_command, "_run_with_limit", lambda arguments, log, limit: (
        log.write_text("error: data.source is gone"), (2, 0.5))[1])
    assert main(["find", *recipe(), "--what", "batch_size"]) == 2
    assert "A step with data.batch_size 4 fails: data.source is gone" in capsys.readouterr().err


def test_invalid_options_are_rejected_before_anything_is_measured(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.png").write_text("mine")
    for words, message in ((["--steps", "5"], "--steps is 5, but must be 20 or more"),
                           (["--plot", "notes.png"], "is not the plot of a range test"),
                           (["--plot", "nowhere/lr.png"], "its folder does not exist"),
                           (["--memory", "0"], "--memory is 0"),
                           (["--what", "batch_size", "--trainer.num_nodes", "2"], "without a launcher")):
        assert main(["find", *recipe(), *words]) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "notes.png").read_text() == "mine"
