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


def ended(losses: list[float], num_steps: int = 100) -> RangeTest:
    """A range test that has seen these losses."""
    test = RangeTest(1e-6, 1.0, num_steps)
    ramp = test.ramp(Optimizer(name="sgd", lr=0.5, momentum=0.9, warmup=7))
    assert (ramp.name, ramp.momentum) == ("sgd", 0.9)
    for step, loss in enumerate(losses):
        if test.add({"lr": ramp.lr_at(step, num_steps), "loss": loss}):
            break
    return test


def test_the_rate_rises_by_one_factor_from_end_to_end():
    test = ended([1.0] * 100)
    assert np.allclose(test.rates, np.geomspace(1e-6, 1, 100), rtol=1e-12)


def test_it_suggests_where_the_loss_falls_fastest_whatever_the_noise_of_batches():
    """The loss falls as a logistic curve around step 60: its steepest place."""
    noise = np.random.default_rng(0).normal(0, 0.3, 100)
    losses = 3 - 2 / (1 + np.exp(-(np.arange(100) - 60) / 5)) + noise
    test = ended(losses.tolist())
    slopes = {centre: np.polyfit(np.arange(25), losses[centre - 12 : centre + 13], 1)[0] for centre in range(12, 88)}
    least = int(np.argmin(test.smoothed))
    expected = min((centre for centre in slopes if centre <= least), key=slopes.get)
    assert test.suggest_lr() == pytest.approx(test.rates[expected], rel=0.05) and abs(expected - 60) <= 4


def test_it_stops_when_the_smoothed_loss_diverges():
    losses = [2.0] * 30 + [3.0 * 2**step for step in range(40)]
    test = ended(losses)
    mean, smoothed = 0.0, []
    for number, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smoothed.append(mean / (1 - SMOOTHING**number))
        if smoothed[-1] > DIVERGENCE * min(smoothed):
            break
    assert test.has_diverged and test.smoothed == pytest.approx(smoothed) and 30 < len(smoothed) < 50


@pytest.mark.parametrize(("losses", "message"), [
    ([2.0] * 10 + [math.nan], "too early"), ([2.0] * 5 + [1e9], "too early"),
    (np.random.default_rng(1).normal(2, 0.3, 100).tolist(), "does not fall clearly|too early"),
    (np.linspace(2, 3, 100).tolist(), "too early")])
def test_where_no_rate_can_be_suggested_it_says_so(losses, message):
    with pytest.raises(UserError, match=message):
        ended(losses).suggest_lr()


@pytest.mark.parametrize("settings", [(0.0, 1.0, 100), (1.0, 1e-3, 100), (1e-7, 1.0, 5)])
def test_a_ramp_that_is_none_is_refused(settings):
    with pytest.raises(UserError, match="but must be"):
        RangeTest(*settings)


# Batch sizes --------------------------------------------------------------------------------------------------------


def measuring(speed, most: int = 10**9):
    """A measurement by formulas: speed by size, the largest size that fits."""
    asked = []

    def measure(size: int) -> Measurement:
        asked.append(size)
        return Measurement(size, speed(size)) if size <= most else Measurement(size, problem="out of memory")

    return measure, asked


@pytest.mark.parametrize(("now", "speed", "most", "asked", "chosen"), [
    (4, lambda size: size, 10**9, [4, 8, 16, 32, 64], 64),  # ever faster: all rows of a step
    (4, lambda size: min(size, 16), 10**9, [4, 8, 16, 32], 16),  # 32 is no faster
    (4, lambda size: size, 16, [4, 8, 16, 32], 16),  # 32 does not fit
    (16, lambda size: size, 3, [16, 8, 4, 2], 2),
    (4, lambda size: 5.0, 10**9, [4, 8], 4)])
def test_the_fastest_size_that_fits_is_found(now, speed, most, asked, chosen):
    measure, seen = measuring(speed, most)
    tried = search([1, 2, 4, 8, 16, 32, 64], now, measure)
    assert seen == asked and choose_best(tried).batch_size == chosen


def test_between_what_fits_and_what_does_not_it_looks_on():
    measure, seen = measuring(lambda size: size, 24)
    assert choose_best(search([1, 2, 3, 4, 6, 8, 12, 16, 24, 48], 4, measure)).batch_size == 24
    assert seen[:4] == [4, 8, 16, 48] and seen[4:] == [24]


def test_where_nothing_fits_it_says_what_to_lower():
    measure, _ = measuring(lambda size: size, 0)
    with pytest.raises(UserError, match="Not even a batch of 1 fits"):
        choose_best(search([1, 2, 4], 4, measure))


def sizes(trainer: dict, **data) -> Sizes:
    return Sizes({"trainer": {"accumulate_grad_batches": 1, **trainer},
                  "data": {"init_args": {"batch_size": 4, "eval_batch_size": None, **data}}})


def test_sizes_keep_rows_and_limits_where_they_are():
    assert sizes({"accumulate_grad_batches": 3}).candidates() == [1, 2, 3, 4, 6, 12]
    found = sizes({"accumulate_grad_batches": 4, "limit_train_batches": 6, "limit_val_batches": 3})
    assert found.candidates() == [1, 2, 4, 8]  # 16 rows would end the epoch in the middle of a micro-batch
    assert found.changes(4) == {} and found.changes(8) == {
        "data.init_args.batch_size": 8, "trainer.accumulate_grad_batches": 2, "trainer.limit_train_batches": 3,
        "data.init_args.eval_batch_size": 4}
    assert "data.init_args.eval_batch_size" not in sizes({"accumulate_grad_batches": 4}).changes(8)


def test_a_process_that_needs_too_much_is_killed_with_its_children(monkeypatch, tmp_path):
    hungry = "import time; held = bytes(1) * 2**28; time.sleep(9)"
    hungry = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{hungry}'])"
    monkeypatch.setattr("lmmods.commands.programs.command", lambda arguments: [sys.executable, "-c", hungry])
    status, most = find_command._run_with_limit([], tmp_path / "log", 0.2)
    assert status == -9 and most > 0.2


# Lines of a recipe ---------------------------------------------------------------------------------------------------


def test_what_is_printed_is_a_recipe_with_these_values(capsys, tmp_path):
    print_changes({"data.init_args.batch_size": 8, "data.init_args.eval_batch_size": 4,
                   "trainer.accumulate_grad_batches": 2, "model.init_args.optimizer.lr": 3.2e-5})
    assert printed(capsys.readouterr().out) == {
        "data": {"init_args": {"batch_size": 8, "eval_batch_size": 4}}, "trainer": {"accumulate_grad_batches": 2},
        "model": {"init_args": {"optimizer": {"lr": 3.2e-5}}}}


def printed(out: str) -> dict:
    """The lines of a recipe at the end of a command's output."""
    return yaml.safe_load(out.split("Set in the recipe:\n")[1])


# From end to end ----------------------------------------------------------------------------------------------------


@pytest.fixture
def found(recipe, tmp_path, monkeypatch, capsys):
    """A function that gives the result of `find` with a tiny recipe, which leaves nothing but that and the picture."""
    monkeypatch.chdir(tmp_path)

    def find(*words: str, **changes) -> dict:
        arguments = recipe(**changes)
        before = {path.name for path in tmp_path.iterdir()}
        assert main(["find", *arguments, *words, "--result", "found.json"]) == 0, capsys.readouterr().err
        assert {path.name for path in tmp_path.iterdir()} - before <= {"found.json", "lr.png"}
        return json.loads(Path("found.json").read_text())

    return find


TEST = {"model__init_args__optimizer__lr": 0.5, "samples__prompts": ["Add 1 and 2."], "data__init_args__val_size": 0.2}


@pytest.fixture
def watched(monkeypatch) -> list[float]:
    """The tokens of each step that a dry run has measured so far."""
    tokens = []

    def watching(setup, watch):
        return dry_run(setup, lambda figures: (tokens.append(figures["num_tokens"]), watch(figures))[1])

    monkeypatch.setattr(find_command, "dry_run", watching)
    return tokens


@pytest.mark.slow
def test_both_engines_suggest_the_same_rate(found, tmp_path, capsys):
    words = "--what lr --steps 24 --min_lr 1e-4 --max_lr 3".split()
    torch = found(*words, **TEST)
    assert printed(capsys.readouterr().out) == {"model": {"init_args": {"optimizer": {"lr": torch["lr"]}}}}
    assert len(torch["rates"]) > 15 and (tmp_path / "lr.png").exists()
    (tmp_path / "lr.png").unlink()
    jax = found(*words, engine="jax", **TEST)
    assert jax["lr"] == torch["lr"] and jax["rates"] == pytest.approx(torch["rates"], rel=1e-6)
    assert jax["losses"][:15] == pytest.approx(torch["losses"][:15], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_step_is_measured_on_the_longest_rows(found, engine, watched):
    step = found("--what", "step", engine=engine)
    assert step["tokens_per_second"] > 0 and step["memory"] > 0.1 and not step["on_device"]
    assert len(watched) == 4 and watched == sorted(watched, reverse=True)


GRPO = {"model__class_path": "GRPO", "model__init_args__rewards": [{"name": "exact_match"}],
        "model__init_args__num_generations": 2, "model__init_args__max_new_tokens": 8,
        "data__class_path": "PromptData"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_step_of_reinforcement_learning_is_measured_without_drawing(found, engine, monkeypatch, watched):
    """Rows are of full length, and no answer is drawn for them."""
    from lmmods.rollouts.maker import RolloutMaker

    monkeypatch.setattr(RolloutMaker, "begin", None)
    assert found("--what", "step", engine=engine, **GRPO)["tokens_per_second"] > 0
    assert watched == [4 * 256] * 4


@pytest.mark.parametrize("what", ["lr", "both"])
def test_a_loss_that_need_not_fall_gives_no_rate(recipe, capsys, what):
    assert main(["find", *recipe(**GRPO), "--what", what]) == 2
    assert "the loss of GRPO does not fall" in (said := capsys.readouterr().err) and "val/reward" in said


@pytest.mark.parametrize(("ends", "chosen"), [
    ({}, 16), ({16: (2, 0.5, "error: Out of memory (x)")}, 8), ({16: (-9, 0.5, "")}, 8), ({8: (-9, 50.0, "")}, 4)])
def test_the_batch_size_is_sought_by_steps_in_other_processes_and_printed(recipe, tmp_path, monkeypatch, capsys, ends,
                                                                          chosen):
    """A process of each size is asked to measure a step; `ends` are exit status, GiB and output of those that fail."""
    monkeypatch.setattr(find_command, "free_memory", lambda: 40.0)
    asked = []

    def watched(arguments, log, limit):
        options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
        size = int(options.get("--data.init_args.batch_size", 4))
        asked.append((size, options["--trainer.accumulate_grad_batches"], options["--what"]))
        status, gib, said = ends.get(size, (0, 0.5, ""))
        log.write_text(said)
        if status == 0:
            Path(options["--result"]).write_text(json.dumps(
                {"tokens_per_second": 100.0 * size, "memory": 0.4, "on_device": False}))
        return status, gib

    monkeypatch.setattr(find_command, "_run_with_limit", watched)
    arguments = recipe(trainer__accumulate_grad_batches=4, trainer__limit_train_batches=8)
    assert main(["find", *arguments, "--what", "batch_size"]) == 0, capsys.readouterr().err
    assert asked == [(4, "2", "step"), (8, "2", "step"), (16, "1", "step")][: len(asked)]
    assert f"Batch size {chosen}: " in (out := capsys.readouterr().out) and not (tmp_path / "run").exists()
    if chosen == 4:
        assert "Set in the recipe" not in out
    else:
        assert printed(out) == {"data": {"init_args": {"batch_size": chosen}}, "trainer": {
            "accumulate_grad_batches": 16 // chosen, "limit_train_batches": 8 * 4 // chosen}}


def test_a_step_that_fails_for_another_reason_ends_the_search(recipe, monkeypatch, capsys):
    monkeypatch.setattr(find_command, "_run_with_limit", lambda arguments, log, limit: (
        log.write_text("error: data.source is gone"), (2, 0.5))[1])
    assert main(["find", *recipe(), "--what", "batch_size"]) == 2
    assert "A step with data.batch_size 4 fails: data.source is gone" in capsys.readouterr().err


def test_wrong_options_are_refused_before_anything_is_measured(recipe, tmp_path, monkeypatch, capsys):
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
