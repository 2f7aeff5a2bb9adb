"""What a run prints at its start and end: correct, and the same on both engines."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmmods.cli import main
from lmmods.core.memory import StepMemory
from lmmods.core.settings import LoRA
from lmmods.core.throughput import Stopwatch
from lmmods.recipe.tasks.base import CausalFields, TaskFields
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.recipe.tasks.preference import PreferenceFields
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.folder import RunFolder
from lmmods.runs.schedule import Schedule
from lmmods.runs.start import RunEnd, RunSummary, say_engine
from lmmods.runs.step_metrics import StepMetrics

DATA = SimpleNamespace(batch_size=4, report={"splits": {"train": {"rows": 38, "tokens": 380}}}, predict_source=None,
                       test_source=None, val_source=None, val_size=0.0)


def build_schedule(**changes) -> Schedule:
    return Schedule.from_keys(**{"batches_per_epoch": 10, "batches_per_step": 3, "num_val_batches": 2,
                                 "max_epochs": None, "max_steps": 6, "val_check_interval": None, "val_epochs": 1,
                                 **changes})


def build_memory(needed: int, **block: float) -> StepMemory:
    return StepMemory({"parameters": needed}, 2**31, "counted from the configuration", **block)


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, "all weights of base"),
    ({"frozen_parameters": ["embed"]}, "a part of the weights of base"),
    ({"pretrained": None, "config": {"model_type": "llama"}}, "all weights, from random ones"),
    ({"lora": LoRA(rank=8), "quantize": "nf4"}, "a LoRA adapter of rank 8 on all-linear, over base in nf4"),
    ({"lora": LoRA(rank=8, dora=True, targets=["q_proj", "v_proj"], modules_to_save=["lm_head"])},
     "a DoRA adapter of rank 8 on q_proj, v_proj, and in full lm_head, over base"),
    ({"adapter": "runs/a/model"}, "the adapter runs/a/model, over base"),
], ids=str)
def test_the_summary_names_the_trained_weights(fields, expected):
    task = TaskFields(**{"pretrained": "base", **fields})
    assert RunSummary(task, "", build_schedule(), 1, build_memory(0)).trains() == expected


def test_the_start_reports_step_length_memory_rollouts_and_rewards(capsys):
    RunSummary(TaskFields(pretrained="base"), "Parameters: 7.", build_schedule(), 2, build_memory(2**30)).say(DATA)
    assert capsys.readouterr().out.splitlines() == [
        "Parameters: 7.", "Trains: all weights of base.", "Step: 24 rows (4 x 3 micro-batches x 2 devices), about 240 "
        "tokens.", "Length: 6 steps (1.5 epochs of 4 steps); 2 validations.",
        "Memory: about 1.00 GiB of 2.00 GiB for a step, counted from the configuration."]
    few_rows = SimpleNamespace(batch_size=16, report={"splits": {"train": {"rows": 5, "tokens": 50}}})
    for batch_size, accumulate, output in (
            (16, 1, "5 rows (an epoch, which is less than data.batch_size 16), about 50 tokens"),
            (4, 4, "5 rows (an epoch, which is less than data.batch_size 4 x 2 micro-batches), about 50 tokens")):
        few_rows.batch_size = batch_size
        lengths = build_schedule(batches_per_epoch=-(-5 // batch_size), batches_per_step=accumulate)
        RunSummary(TaskFields(pretrained="base"), "", lengths, 1, build_memory(0)).say(few_rows)
        assert f"Step: {output}." in capsys.readouterr().out.splitlines()
    stream = build_schedule(batches_per_epoch=10**12, batches_per_step=1, num_val_batches=0)
    RunSummary(TaskFields(pretrained="base"), "", stream, 1, build_memory(2**32)).say(
        SimpleNamespace(batch_size=4, report={"splits": {}}))
    output = capsys.readouterr().out
    assert "Step: 4 rows.\nLength: 6 steps; no validations.\nwarning: Memory: about 4.00 GiB" in output
    assert "It will probably not fit: lower data.batch_size" in output
    short = build_memory(2**30, block=0.9 * 2**30, gap=2**30)
    RunSummary(TaskFields(pretrained="base"), "", stream, 1, short).say(DATA)
    output = capsys.readouterr().out
    assert "warning: Memory: about 1.00 GiB" in output and "It may not fit: lower" in output
    task = GRPOFields(pretrained="base", rewards=[{"name": "exact_match"}, {"name": "f1", "weight": 0.5}],
                      num_generations=4, max_new_tokens=10, steps_per_rollout=2, num_iterations=3)
    RunSummary(task, "", build_schedule(), 2, build_memory(0)).say(DATA)
    assert capsys.readouterr().out.splitlines()[2:5] == [
        "Step: 6 prompts x 4 answers (4 x 3 micro-batches x 2 devices), about 60 prompt tokens and at most 240 "
        "answer tokens.", "Rollouts: 4 per epoch, each of 12 prompts x 4 answers for 2 steps, 3 passes.",
        "Rewards: exact_match (weight 1), f1 (weight 0.5)."]
    few_rows.batch_size = 8
    RunSummary(task, "", build_schedule(batches_per_epoch=3), 1, build_memory(0)).say(few_rows)
    assert capsys.readouterr().out.splitlines()[2:4] == [
        "Step: 5 prompts x 4 answers (an epoch, which is less than data.batch_size 8 x 3 micro-batches), about 50 "
        "prompt tokens and at most 200 answer tokens.",
        "Rollouts: 1 per epoch, each of 5 prompts x 4 answers for 2 steps, 3 passes."]
    say_engine("jax", 2, "CPU", "bf16-mixed", "this CPU multiplies bfloat16")
    assert capsys.readouterr().out == ("Engine jax on 2 devices (CPU), precision bf16-mixed: this CPU multiplies "
                                       "bfloat16; trainer.precision sets another.\n")


def test_the_end_reports_the_results_and_the_next_commands(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["../lmmods/train.py", "fit"])
    metrics, policy = StepMetrics(Stopwatch()), CheckpointPolicy()
    metrics.num_tokens, metrics.latest = 12345, {"train/loss": 1.0, "val/loss": 0.5}
    folder = RunFolder("runs/my run")
    adapter = CausalFields(pretrained="base", lora=LoRA())

    def print_end(task=adapter, policy=policy, data=DATA, first=0) -> str:
        RunEnd(folder, task, data, metrics, policy, first, 50, 3661.0, []).say()
        return capsys.readouterr().out

    assert print_end() == ("Done: 50 steps in 1:01:01, 12,345 tokens since the start of the run.\n"
                           "Validation at the end: val/loss 0.5\nNext:\n"
                           "  python ../lmmods/train.py chat --run 'runs/my run'\n"
                           "  python ../lmmods/train.py merge --run 'runs/my run' --out 'runs/my run-merged'\n")
    policy.best = [(0.25, "step=40")]
    data = SimpleNamespace(**{**vars(DATA), "val_size": 4})
    resumed = print_end(data=data, first=20)
    assert "Done: steps 21 to 50 in" in resumed and "Best: val/loss 0.25 at step 40 (--ckpt_path best).\n" in resumed
    assert "predict --config 'runs/my run/config.yaml' --ckpt_path best\n" in resumed
    assert "merge" not in print_end(CausalFields(pretrained="base"))
    assert "predict" not in print_end(policy=None, data=data)
    assert "Next" not in print_end(TaskFields(pretrained="base"))
    assert "learned nothing" not in print_end()
    metrics.num_tokens = 0
    assert "warning: The model has learned nothing: no step had a target token.\n" in print_end()


@pytest.mark.parametrize(("accuracies", "more_accurate"), [
    ({10: 0.5, 20: 0.75, 30: 0.7}, None),
    ({10: 0.5, 20: 0.75, 30: 0.875, 40: 0.875}, "0.875 at step 30, 0.75 at step 20"),
    ({10: 0.5, 30: 0.875}, None),  # the accuracy at step 20 is unknown
    ({}, None)])
def test_the_end_reports_a_more_accurate_checkpoint_than_the_best_by_loss(capsys, tmp_path, accuracies, more_accurate):
    policy, folder = CheckpointPolicy(), RunFolder(tmp_path)
    policy.best = [(0.25, "step=20")]
    folder.metrics_csv.write_text("step,train/loss,val/rewards/accuracy\n5,0.7,\n" + "".join(
        f"{step},,{value}\n" for step, value in accuracies.items()))
    end = RunEnd(folder, PreferenceFields(pretrained="base"), DATA, StepMetrics(Stopwatch()), policy, 0, 50, 9.0, [])
    end.say()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "accurate" in line] == ([
        f"Another checkpoint was more accurate: val/rewards/accuracy was {more_accurate}. To keep it, set "
        "checkpoint.monitor: val/rewards/accuracy and checkpoint.mode: max."] if more_accurate else [])
    policy.monitor = "val/rewards/accuracy"
    end.say()
    assert "accurate:" not in capsys.readouterr().out


@pytest.mark.slow
def test_both_engines_print_the_same(recipe, tmp_path, capfd):
    """In the same order, apart from lines specific to an engine; libraries print nothing."""
    printed = {}
    for engine in ("torch", "jax"):
        arguments = recipe(engine=engine, samples={"prompts": ["Add 1 and 2."], "every_n_steps": 3},
                           trainer__enable_progress_bar=True, trainer__log_every_n_steps=2,
                           trainer__default_root_dir=str(tmp_path / "run"), data__init_args__pad_to_multiple_of=192)
        assert main(["fit", *arguments, "--overwrite", "true"]) == 0
        output = capfd.readouterr()
        assert not output.err
        lines = output.out.splitlines()
        assert lines[0] == f"Engine {engine} on 1 device (CPU), precision 32-true: set by trainer.precision."
        assert lines[1] == f"Run folder: {tmp_path / 'run'}."
        printed[engine] = [re.sub(r"about [\d.]+ GiB|memory [\d.]+ GiB|tokens_per_second [\d.e+]+|\d:\d\d:\d\d"
                                  r"|On this CPU a micro-batch.*|-> .*", "…", line).strip(" …") for line in lines[1:]]
    assert printed["torch"] == printed["jax"]
    text = "\n".join(printed["jax"])
    for part in ("Trains: a LoRA adapter of rank 4", "Length: 6 steps", "sample at step 0", "step 2/6  loss ",
                 " (smoothed ", "val/loss", "Wrote ", "Done: 6 steps in", "Best: val/loss", "Validation at the end: ",
                 f"predict --config {tmp_path}/run/config.yaml --ckpt_path best"):
        assert part in text
    assert Path(tmp_path / "run" / "config.yaml").exists()
