"""Which events follow a step, and in which order: as a table, and as both engines perform them."""

import pytest

from lmmods.cli import main
from lmmods.evaluation.mmlu import MMLUEvaluator
from lmmods.evaluation.samples import SampleWriter
from lmmods.runs.checkpoint_policy import CheckpointPolicy
from lmmods.runs.events import Event, Events, RunState
from lmmods.runs.folder import RunFolder
from lmmods.runs.hub_upload import Publisher

# A run that samples, evaluates and saves every two steps, uploads each checkpoint, and may stop early.
RULES = {"checkpoint": CheckpointPolicy(every_n_steps=2), "samples": SampleWriter(["Why?"], every_n_steps=2),
         "mmlu": MMLUEvaluator("questions.csv", every_n_steps=2), "publish": Publisher("me/model", when="save"),
         "may_stop_early": True}
AT_VALIDATION = {"mmlu": MMLUEvaluator("questions.csv")}
UNSAVED = {"checkpoint": None}
QUIET = {"samples": SampleWriter(), "mmlu": MMLUEvaluator(), "publish": Publisher(), "may_stop_early": False}
# Facts that are false in the middle of an epoch.
EPOCH, VALIDATES = {"epoch_ends": True}, {"validates": True}
ENDS, INTERRUPTED = {"run_ends": True}, {"is_interrupted": True}


def build_state(step: int, **facts: bool) -> RunState:
    names = ("validates", "run_ends", "is_interrupted", "is_saved")
    return RunState(step, facts.get("epoch_ends", False), *(lambda name=name: facts.get(name, False) for name in names))


def join_events(events) -> str:
    return ", ".join(events)


@pytest.mark.parametrize(("rules", "step", "facts", "expected"), [
    ({}, 1, {}, "log"),
    ({}, 2, {}, "log, sample, ask, save, upload"),
    (QUIET, 2, {}, "log, save"),
    ({}, 1, EPOCH, "log, check epoch"),
    (QUIET, 1, EPOCH, "log"),
    ({}, 1, EPOCH | VALIDATES, "log, validate, check validation, rank, save, upload"),
    ({}, 2, VALIDATES, "log, sample, ask, validate, check validation, rank, save, upload"),
    (AT_VALIDATION, 2, VALIDATES, "log, sample, validate, ask, check validation, rank, save, upload"),
    (AT_VALIDATION, 2, {}, "log, sample, save, upload"),
    (QUIET, 1, VALIDATES, "log, validate, rank, save"),
    ({}, 1, ENDS, "log, sample, ask, save, upload"),
    (AT_VALIDATION, 1, ENDS, "log, sample, ask, save, upload"),
    (AT_VALIDATION, 1, ENDS | VALIDATES, "log, sample, validate, ask, check validation, rank, save, upload"),
    ({}, 1, INTERRUPTED, "log, save, stop"),
    ({}, 2, INTERRUPTED | VALIDATES, "log, sample, ask, validate, check validation, rank, save, stop"),
    (UNSAVED, 2, {}, "log, sample, ask"),
    (UNSAVED, 2, VALIDATES, "log, sample, ask, validate, check validation"),
    (UNSAVED, 1, INTERRUPTED, "log, stop"),
])
def test_events_after_a_step_come_in_their_fixed_order(rules, step, facts, expected):
    assert join_events(Events(**RULES | rules).after_step(build_state(step, **facts))) == expected


def test_an_interrupt_inside_a_step_saves_the_state_before_it():
    """Save the state before the step, unless it is saved already."""
    assert join_events(Events(**RULES).inside_step(build_state(2))) == "save, stop"
    assert join_events(Events(**RULES).inside_step(build_state(2, is_saved=True))) == "stop"
    assert join_events(Events(**RULES | UNSAVED).inside_step(build_state(2))) == "stop"


@pytest.mark.parametrize(("rules", "facts", "expected"), [
    ({}, {"is_saved": True}, "sample, ask, finish, publish"),
    ({}, {}, "sample, ask, save, upload, finish, publish"),
    ({}, INTERRUPTED, "sample, ask, save, stop, finish, publish"),  # stop raises
    (UNSAVED, INTERRUPTED, "sample, ask, finish, publish"),
    (QUIET, {"is_saved": True}, "finish"),
])
def test_events_at_the_end_of_a_run(rules, facts, expected):
    assert join_events(Events(**RULES | rules).at_end(build_state(3, **facts))) == expected


def test_only_a_new_run_samples_before_the_first_step():
    assert join_events(Events(**RULES).at_start(resumed=False)) == "sample"
    assert not [*Events(**RULES).at_start(resumed=True), *Events(**RULES | QUIET).at_start(resumed=False)]


def test_an_event_may_change_the_events_that_follow_it():
    """Early stopping at an epoch's end makes this the last step, which is sampled, validated and saved."""
    ended = []
    state = RunState(3, True, validates=lambda: bool(ended), run_ends=lambda: bool(ended),
                     is_interrupted=lambda: False, is_saved=lambda: False)
    performed = []
    for event in Events(**RULES).after_step(state):
        performed.append(event)
        if event is Event.CHECK_EPOCH:
            ended.append(True)
    assert join_events(performed) == "log, check epoch, sample, ask, validate, check validation, rank, save, upload"


@pytest.fixture
def performed(monkeypatch) -> list[str]:
    """Events that an engine performs, by its calls of shared code."""
    from lmmods.evaluation.early_stopping import EarlyStoppingRule
    from lmmods.runs import step_metrics

    events: list[str] = []

    def watch(owner: object, name: str, event: str) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: (events.append(event), call(*args, **kwargs))[1])

    watch(step_metrics.StepMetrics, "add", "log")
    watch(SampleWriter, "write", "sample")
    watch(MMLUEvaluator, "score", "ask")
    watch(EarlyStoppingRule, "check", "check validation")
    watch(CheckpointPolicy, "rank", "rank")
    watch(CheckpointPolicy, "decide", "save")
    watch(RunFolder, "write_files", "validate")
    watch(RunFolder, "complete", "finish")
    return events


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_both_engines_perform_the_events_in_this_order(recipe, tmp_path, instructions, engine, performed):
    questions = tmp_path / "questions.csv"
    questions.write_text("subject,input,output\nsums,Is it A? Answer:,A\nsums,Is it B? Answer:,B\n")
    arguments = recipe(
        engine=engine, trainer__max_steps=3, trainer__val_check_interval=2, model__init_args__quantize=None,
        trainer__callbacks=[{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}}],
        samples={"prompts": ["Add 1 and 2."], "every_n_steps": 2, "max_new_tokens": 2},
        mmlu={"source": str(questions), "every_n_steps": 2, "max_length": 64})
    assert main(["fit", *arguments]) == 0
    evaluation = "log, sample, ask, validate, check validation, rank, save"
    assert join_events(performed) == f"sample, log, {evaluation}, {evaluation}, finish"
