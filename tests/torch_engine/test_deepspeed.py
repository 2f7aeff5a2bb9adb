"""DeepSpeed ZeRO: two processes (gloo, CPU) take the steps of one, and runs resume with and without it."""

import importlib.util
import json
from types import SimpleNamespace

import pytest

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.torch_engine.strategies.deepspeed import DeepSpeed
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.engines.test_distributed import figures, same_figures, same_weights, task, with_two  # noqa: F401 - a fixture

installed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None,
                               reason="deepspeed is not installed: pip install -e .[deepspeed]")
LORA = {"model__init_args__quantize": None}
HALFWAY = {"trainer__max_steps": 8, "trainer__val_check_interval": 1.0,
           "checkpoint": {"every_n_steps": 4, "keep_last": 9, "monitor": "val/loss"}}


def zero(stage: int, **options) -> dict:
    """Return a strategy that also shards small parameters."""
    return {"class_path": "lmmods.strategies.DeepSpeed",
            "init_args": {"stage": stage, "persistence_threshold": 0, **options}}


# Without deepspeed ---------------------------------------------------------------------------------------------------


def test_a_missing_deepspeed_package_is_reported(recipe, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *args: None if name == "deepspeed" else find(name, *args))
    assert main(["fit", *recipe(trainer__strategy=zero(2))]) == 2
    assert "pip install -e .[deepspeed]" in capsys.readouterr().err


@pytest.fixture
def reject_run():
    """Return a function that returns DeepSpeed's error for a run it would not train exactly."""
    def reject(stage: int = 2, quantize: str | None = None, optimizer: str = "adamw", precision: str = "32-true",
               clip: str | None = None, images: bool = False) -> str:
        module = SimpleNamespace(quantize=quantize, images=images,
                                 optimizer=SimpleNamespace(name=optimizer, ema_decay=None),
                                 trainer=SimpleNamespace(precision=precision, gradient_clip_algorithm=clip))
        with pytest.raises(UserError) as error:
            DeepSpeed(stage=stage).check_run(module)
        return str(error.value)

    return reject


@pytest.mark.parametrize(("run", "message"), [
    ({"stage": 3, "quantize": "nf4"}, "model.quantize nf4"),
    ({"quantize": "int8"}, "model.quantize int8"),
    ({"images": True}, "model.images cannot be combined"),
    ({"optimizer": "adamw_8bit"}, "optimizer.name adamw_8bit"),
    ({"optimizer": "adafactor"}, "optimizer.name adafactor"),
    ({"precision": "16-mixed"}, "trainer.precision 16-mixed"),
    ({"clip": "value"}, "trainer.gradient_clip_algorithm value"),
])
def test_settings_that_would_not_train_exactly_are_rejected_by_name(reject_run, run, message):
    assert message in reject_run(**run)


def test_offloading_parameters_requires_stage_3(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match="offload_parameters needs stage 3"):
        DeepSpeed(stage=2, offload_parameters=True).check()


# With it -------------------------------------------------------------------------------------------------------------


@installed
@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage", "changes"), [
    ("full", 2, {}), ("full", 3, {}), ("clm", 2, {}), ("clm", 3, {}), ("mlm", 3, {}), ("qa", 2, {}), ("qa", 3, {}),
    ("qlora", 2, LORA), ("qlora", 3, LORA), ("qlora", 2, {}),
])
def test_two_processes_take_the_steps_of_one(task, name, stage, changes):  # noqa: F811
    one, arguments = task(name, "one", **changes)
    assert main(["fit", *arguments]) == 0
    two, arguments = task(name, "two", 2, zero(stage), **changes)
    out = with_two(arguments)
    summary, = (line for line in out.splitlines() if line.startswith("Parameters:"))
    assert ": 0," not in summary
    same_figures(two, one, rel=1e-4)
    same_weights(two.resolve("last") / "model.safetensors", one.resolve("last") / "model.safetensors")
    exported, = one.model.glob("*.safetensors")
    same_weights(two.model / exported.name, exported)


@installed
@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"stage": 2, "offload_optimizer": True},
    {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
], ids=["stage 2", "stage 3"])
def test_offloading_changes_no_result(task, options):  # noqa: F811
    """Each process accumulates two micro-batches per step."""
    one, arguments = task("clm", "one", window=4)
    assert main(["fit", *arguments]) == 0
    two, arguments = task("clm", "two", 2, zero(**options), window=4)
    with_two(arguments)
    same_figures(two, one, rel=1e-4)
    same_weights(two.resolve("last") / "model.safetensors", one.resolve("last") / "model.safetensors")


@installed
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "steps", "rel"), [("bf16-mixed", 3, 1e-4), ("bf16-true", 1, 1e-2)])
@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_take_the_first_steps_of_one_in_half_precision(task, stage, precision, steps, rel):  # noqa: F811
    """Only the first steps: differences in bfloat16 rounding grow, fastest without float32 copies."""
    one, arguments = task("qlora", "one", trainer__precision=precision, **LORA)
    assert main(["fit", *arguments]) == 0
    two, arguments = task("qlora", "two", 2, zero(stage), trainer__precision=precision, **LORA)
    with_two(arguments)
    assert len(figures(two)) == len(figures(one))
    for row, expected in zip(figures(two)[:steps], figures(one)[:steps], strict=True):
        assert row == pytest.approx(expected, rel=rel), row


@installed
@pytest.mark.slow
@pytest.mark.parametrize(("name", "first", "then"), [
    ("clm", (1, "ddp"), (2, zero(2))), ("clm", (1, "ddp"), (2, zero(3))), ("clm", (2, zero(2)), (1, "ddp")),
    ("clm", (2, zero(3)), (2, "fsdp")), ("qlora", (2, zero(3)), (2, zero(2))),
], ids=["1 to stage 2", "1 to stage 3", "stage 2 to 1", "stage 3 to fsdp", "LoRA, stage 3 to 2"])
def test_a_run_resumes_with_another_strategy(task, name, first, then):  # noqa: F811
    """Stopped at step 4 of 8, it has the metrics of an uninterrupted run."""
    changes = HALFWAY | (LORA if name == "qlora" else {})
    straight, arguments = task(name, "straight", **changes)
    assert main(["fit", *arguments]) == 0
    run, arguments = task(name, "run", *first, **changes)
    with_two(arguments) if first[0] == 2 else main(["fit", *arguments])
    _, arguments = task(name, "run", *then, **changes)
    arguments += ["--ckpt_path", "4", "--overwrite", "true"]
    with_two(arguments) if then[0] == 2 else main(["fit", *arguments])
    same_figures(run, straight, rel=1e-4)
    assert json.loads(run.metrics_json.read_text())["trainer/global_step"] == 8
