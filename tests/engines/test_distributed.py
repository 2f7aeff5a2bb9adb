"""Two processes (gloo, CPU) compared with one on the same rows: every task, replicated and sharded."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.core.settings import Optimizer
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.sharding import check_network
from lmmods.torch_engine.strategies.fsdp2 import FSDP2
from tests import losses_in_turn
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.data.test_qa import squad
from tests.forks import together

SPLIT_DEPENDENT = {"train/tokens_per_second", "train/epoch"}  # metrics that depend on the number of processes
# A constant added before a softmax has no effect, so these get no gradient and Adam moves them by rounding errors only.
WITHOUT_GRADIENT = ("key.bias", "layer.1.output.LayerNorm.bias", "qa_outputs.bias")
FULL = {"model__init_args__quantize": None, "model__init_args__lora": None}
BERT = {"model_type": "bert", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64}
ALBERT = {**BERT, "model_type": "albert", "embedding_size": 24, "hidden_dropout_prob": 0.1}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}


def figures(folder: RunFolder) -> list[dict[str, float]]:
    with open(folder.metrics_csv, newline="") as file:
        return [{key: float(value) for key, value in row.items() if value and key not in SPLIT_DEPENDENT}
                for row in csv.DictReader(file)]


def with_two(arguments: list[str], command: str = "fit", status: int = 0) -> str:
    """Run a command that starts a second process, as Lightning does, and return its output."""
    output, = together([command, *arguments], status=status)
    return output


def same_figures(folder: RunFolder, other: RunFolder, rel: float) -> None:
    rows, expected = figures(folder), figures(other)
    assert len(rows) == len(expected)
    for row, expected_row in zip(rows, expected):
        assert row == pytest.approx(expected_row, rel=rel), row


def same_weights(path: Path, other: Path) -> None:
    weights, expected = load_file(path), load_file(other)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        if not name.endswith(WITHOUT_GRADIENT):
            torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture
def task(recipe, tmp_path, tokenizer_folder, bert_folder):  # noqa: F811
    """Return a function that writes a task's recipe and returns its run folder and the arguments."""
    text = tmp_path / "texts.txt"
    text.write_text("\n\n".join(f"the quick brown fox jumps over {n} lazy dogs" * (1 + n % 3) for n in range(40)))
    source = squad(tmp_path)
    texts = {"source": str(text), "documents": "paragraph", "val_size": 0.2, "max_length": 48}
    optimizer = {"lr": 0.003}
    tasks = {
        # Adam takes a step of about lr even where rounding decides the sign of a gradient near zero.
        "qlora": {"model__init_args__optimizer": optimizer}, "full": FULL,
        "clm": {"model": {"class_path": "CLM", "init_args": {"config": GPT2, "optimizer": optimizer}},
                "data": {"class_path": "CLMData", "init_args": {"tokenizer": str(tokenizer_folder), **texts}}},
        "mlm": {"model": {"class_path": "MLM", "init_args": {"config": BERT, "optimizer": optimizer}},
                "data": {"class_path": "MLMData", "init_args": {"tokenizer": str(bert_folder), **texts}}},
        "albert": {"model": {"class_path": "MLM", "init_args": {"config": ALBERT, "optimizer": optimizer}},
                   "data": {"class_path": "MLMData", "init_args": {"tokenizer": str(bert_folder), **texts}}},
        "qa": {"model": {"class_path": "QA", "init_args": {"config": BERT, "optimizer": optimizer}},
               "data": {"class_path": "QAData", "init_args": {
                   "tokenizer": str(bert_folder), "source": source, "val_source": source, "max_length": 48,
                   "stride": 16, "question_max_length": 16}}},
    }

    def write(name: str, folder: str, processes: int = 1, strategy: str | dict = "ddp", window: int = 2, **changes):
        run = RunFolder(tmp_path / folder)
        return run, recipe(f"{folder}.yaml", **{
            **tasks[name], "data__init_args__batch_size": 3, "trainer__max_steps": 6,
            "trainer__gradient_clip_val": 0.5, "trainer__val_check_interval": 6,
            "trainer__accumulate_grad_batches": window // processes, "trainer__devices": processes,
            "trainer__default_root_dir": str(run.root), **({"trainer__strategy": strategy} if processes > 1 else {}),
            **changes})

    return write


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qlora", "full", "clm", "mlm", "qa"])
def test_two_processes_take_the_steps_of_one(task, name):
    """One process has two micro-batches a step, two processes one each. At the end of an epoch, one has no rows."""
    one, arguments = task(name, "one")
    assert main(["fit", *arguments]) == 0
    for strategy in ("ddp", "fsdp"):
        two, arguments = task(name, strategy, 2, strategy)
        assert with_two(arguments).count("Parameters:") == 1  # logged once
        same_figures(two, one, rel=1e-4)
        same_weights(two.resolve("last") / "model.safetensors", one.resolve("last") / "model.safetensors")
        exported, = one.model.glob("*.safetensors")
        same_weights(two.model / exported.name, exported)


TENSOR = {"class_path": "lmmods.strategies.FSDP2", "init_args": {"tensor_parallel_size": 2}}
FOUR_STEPS = {"model__init_args__optimizer": {"lr": 0.003}, "trainer__val_check_interval": 4, "trainer__max_steps": 4,
              "model__init_args__config_overrides": {"attention_dropout": 0.0}, "model__init_args__quantize": None,
              "checkpoint": {"every_n_steps": 2, "keep_last": 9}}
ADAPTER = {"model__init_args__lora": {"rank": 4, "targets": "all-linear"}, "data__init_args__packing": True,
           "model__init_args__gradient_checkpointing": True}


@pytest.mark.slow
def test_tensor_parallel_processes_take_the_steps_of_one_and_it_resumes_them(task):
    """Four processes; two share each micro-batch."""
    one, arguments = task("full", "one", **FOUR_STEPS)
    assert main(["fit", *arguments]) == 0
    four, arguments = task("full", "four", 2, TENSOR, **FOUR_STEPS,
                           trainer__accumulate_grad_batches=1, trainer__devices=4)
    output, = together(["fit", *arguments])
    assert output.count("Parameters:") == 1
    same_figures(four, one, rel=1e-5)
    same_weights(four.resolve("last") / "model.safetensors", one.resolve("last") / "model.safetensors")
    same_weights(four.model / "model.safetensors", one.model / "model.safetensors")
    _, arguments = task("full", "four", **FOUR_STEPS)
    assert main(["fit", *arguments, "--ckpt_path", "2", "--overwrite", "true"]) == 0
    same_figures(four, one, rel=1e-5)


@pytest.mark.slow
def test_tensor_parallel_processes_resume_the_adapter_run_of_one(task):
    one, arguments = task("qlora", "one", **FOUR_STEPS, **ADAPTER)
    assert main(["fit", *arguments]) == 0
    two, arguments = task("qlora", "two", 2, TENSOR, **FOUR_STEPS, **ADAPTER, trainer__accumulate_grad_batches=2)
    shutil.copytree(one.root, two.root, symlinks=True)
    with_two([*arguments, "--ckpt_path", "2", "--overwrite", "true"])
    same_figures(two, one, rel=1e-5)
    same_weights(two.resolve("last") / "model.safetensors", one.resolve("last") / "model.safetensors")
    same_weights(two.model / "adapter_model.safetensors", one.model / "adapter_model.safetensors")


CONTEXT = {"class_path": "lmmods.strategies.FSDP2",
           "init_args": {"context_parallel_size": 2, "sharded_checkpoints": True}}


@pytest.mark.slow
def test_context_parallel_processes_take_the_steps_of_one_and_resume_each_other(task, stop_at):
    """Also resume a run stopped inside a step."""
    changes = {**FOUR_STEPS, **ADAPTER, "model__init_args__quantize": "nf4",
               "checkpoint": {"every_n_steps": 2, "keep_last": 9}}
    changes["model__init_args__lora"] = {**ADAPTER["model__init_args__lora"], "dropout": 0.1}
    one, for_one = task("qlora", "one", **changes)
    assert main(["fit", *for_one]) == 0
    two, for_two = task("qlora", "two", 2, CONTEXT, **changes, trainer__accumulate_grad_batches=2)
    assert with_two(for_two).count("Parameters:") == 1
    same_figures(two, one, rel=1e-5)
    same_weights(two.model / "adapter_model.safetensors", one.model / "adapter_model.safetensors")
    _, for_one = task("qlora", "two", **changes)
    assert main(["fit", *for_one, "--ckpt_path", "2", "--overwrite", "true"]) == 0
    same_figures(two, one, rel=1e-5)
    stop_at(3)
    assert main(["fit", *for_one, "--overwrite", "true"]) == 130 and two.find("last").name == "step=1"
    with_two([*for_two, "--ckpt_path", "last"])
    same_figures(two, one, rel=1e-5)


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_type": "gpt2"}, "is not supported for gpt2"), ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ({"attention_dropout": 0.1}, "attention_dropout 0.1")])
def test_models_without_tensor_parallel_support_are_rejected(changes, message):
    config = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 8,
              "attention_dropout": 0.0} | changes
    with pytest.raises(UserError, match=message):
        check_network(SimpleNamespace(**config), 2)


@pytest.mark.parametrize(("sizes", "changes", "message"), [
    ((2, 1), {"quantize": "nf4"}, "cannot be combined with model.quantize nf4"),
    ((2, 1), {"compile": True}, "tensor_parallel_size 2 cannot be combined with model.compile"),
    ((1, 2), {"compile": True}, "context_parallel_size 2 cannot be combined with model.compile"),
    ((1, 2), {"attention": "eager"}, "cannot be combined with model.attention eager"),
    ((1, 2), {"auto_class": "AutoModelForMaskedLM"}, "cannot be combined with model.class_path SimpleNamespace"),
    ((2, 1), {"images": True}, "tensor_parallel_size 2 cannot be combined with model.images"),
    ((1, 2), {"images": True, "auto_class": "AutoModelForImageTextToText"},
     "context_parallel_size 2 cannot be combined with model.images. "),
    ((3, 1), {}, "tensor_parallel_size 3 must divide the number of processes, 2"),
    ((2, 2), {}, "size 2 × context_parallel_size 2 must divide"),
    ((0, 1), {}, "must divide the number of processes, 2"),
    ((2, 1), {"trainer": SimpleNamespace(gradient_clip_algorithm="value")}, "trainer.gradient_clip_algorithm value")])
def test_settings_that_tensor_or_context_parallelism_excludes_are_rejected(monkeypatch, sizes, changes, message):
    monkeypatch.setattr(FSDP2, "num_processes", 2)
    module = {"quantize": None, "compile": False, "optimizer": Optimizer(), "attention": None,
              "auto_class": "AutoModelForCausalLM", "trainer": SimpleNamespace(gradient_clip_algorithm="norm")}
    strategy = FSDP2(tensor_parallel_size=sizes[0], context_parallel_size=sizes[1])
    with pytest.raises(UserError, match=message):
        strategy.check_run(SimpleNamespace(**module | changes))


@pytest.fixture
def preferences(tmp_path):
    """Return changes for seven rows; in an epoch's last step, one of two processes has none."""
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps(
        {"prompt": f"Add {n} and {n + 1}." + " Please." * (n % 3), "chosen": f"It is {2 * n + 1}." * (1 + n % 2),
         "rejected": "No idea." * (1 + n % 4)}) + "\n" for n in range(7)))
    return {"model__class_path": "Preference", "data__class_path": "PreferenceData",
            "data__init_args__source": str(answers), "data__init_args__val_source": str(answers),
            "data__init_args__val_size": 0, "data__init_args__eval_batch_size": 2,
            "model__init_args__optimizer": {"name": "sgd", "lr": 0.01}, "trainer__max_steps": 4,
            "trainer__val_check_interval": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss", "strategy", "reference"), [
    ("full", "sigmoid", "ddp", "cache"), ("full", "sigmoid", "fsdp", "copy"),
    ("full", "kto", "fsdp", "cache"), ("full", "apo_zero_unpaired", "ddp", "copy"),
    ("qlora", "sigmoid", "fsdp", "base"), ("qlora", "kto", "ddp", "base")])
def test_two_processes_train_on_preferences_as_one_does(task, preferences, name, loss, strategy, reference, tmp_path):
    """The baseline of KTO is computed over both processes."""
    changes = {**preferences, "model__init_args__loss": loss, "model__init_args__reference": reference,
               **({"model__init_args__optimizer": {"name": "sgd", "lr": 1.0}} if name == "qlora" else {})}
    one, arguments = task(name, "one", **changes)
    assert main(["fit", *arguments]) == 0
    two, arguments = task(name, "two", 2, strategy, **changes, data__init_args__cache_dir=str(tmp_path / "two"))
    num_passes = with_two(arguments).count("under the reference")
    assert num_passes == (reference == "cache")  # once, as the validation rows are the training rows
    for row, expected in zip(figures(two), figures(one), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert figures(one)[-1]["train/rewards/chosen"] != 0
    same_weights(two.resolve("last") / "model.safetensors", one.resolve("last") / "model.safetensors")


@pytest.mark.slow
def test_every_pair_loss_is_the_same_on_two_processes(task, preferences):
    """One run uses each loss in turn; gradients show in the norms and in the next step's loss."""
    changes = {**preferences, "model__class_path": f"{losses_in_turn.__name__}.LossesInTurn",
               "trainer__limit_val_batches": 0, "trainer__max_steps": len(losses_in_turn.LOSSES)}
    one, arguments = task("full", "one", **changes)
    assert main(["fit", *arguments, "--trust_recipe_code", "true"]) == 0
    assert len(figures(one)) == len(losses_in_turn.LOSSES)
    for strategy in ("ddp", "fsdp"):
        two, arguments = task("full", strategy, 2, strategy, **changes)
        with_two([*arguments, "--trust_recipe_code", "true"])
        for row, expected in zip(figures(two), figures(one), strict=True):
            assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_layers_that_share_weights_are_sharded_exactly(task):
    one, arguments = task("albert", "one")
    assert main(["fit", *arguments]) == 0
    two, arguments = task("albert", "two", 2, "fsdp")
    with_two(arguments)
    same_figures(two, one, rel=1e-4)


@pytest.mark.slow
def test_two_processes_resume_inside_a_step_of_one(task, stop_at):
    """Two of its four micro-batches are done."""
    changes = {"data__init_args__batch_size": 2, "trainer__max_steps": 4, "trainer__val_check_interval": 2}
    straight, arguments = task("qlora", "straight", window=4, **changes)
    assert main(["fit", *arguments]) == 0
    interrupted, arguments = task("qlora", "ddp", window=4, **changes)
    stop_at(6)
    assert main(["fit", *arguments]) == 130 and interrupted.find("last").name == "step=1"
    shutil.copytree(interrupted.root, interrupted.root.with_name("fsdp"), symlinks=True)
    for strategy in ("ddp", "fsdp"):
        run, arguments = task("qlora", strategy, 2, strategy, window=4, **changes)
        with_two([*arguments, "--ckpt_path", "last"])
        same_figures(run, straight, rel=1e-5)
        same_weights(run.resolve("last") / "model.safetensors", straight.resolve("last") / "model.safetensors")


SHARDED = {"class_path": "lmmods.strategies.FSDP2", "init_args": {"sharded_checkpoints": True}}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [
    ((1, "ddp"), (2, "ddp")), ((2, "ddp"), (1, "ddp")), ((2, SHARDED), (1, "ddp")), ((1, "ddp"), (2, SHARDED)),
], ids=["1 to 2", "2 to 1", "sharded to 1", "1 to sharded"])
def test_a_run_resumes_with_another_number_of_processes(task, first, then):
    """Stop at step 4 of 8, in the second epoch, resume with others and compare with an uninterrupted run."""
    common = {"trainer__max_steps": 8, "trainer__val_check_interval": 1.0, "checkpoint": {"every_n_steps": 4,
              "keep_last": 9, "monitor": "val/loss"}, "model__init_args__frozen_parameters": ["ln_"],
              "model__init_args__optimizer": {"lr": 0.003, "ema_decay": 0.8, "layer_decay": 0.9}}
    straight, arguments = task("clm", "straight", **common)
    assert main(["fit", *arguments]) == 0
    run, arguments = task("clm", "run", *first, **common)
    with_two(arguments) if first[0] == 2 else main(["fit", *arguments])
    files = [path.name for path in run.checkpoint("step=4").glob("model*")]
    assert len(files) == (2 if first[1] == SHARDED else 1)
    _, arguments = task("clm", "run", *then, **common)
    arguments += ["--ckpt_path", "4", "--overwrite", "true"]
    with_two(arguments) if then[0] == 2 else main(["fit", *arguments])
    same_figures(run, straight, rel=1e-4)
    same_weights(run.model / "model.safetensors", straight.model / "model.safetensors")  # averages
    assert json.loads(run.metrics_json.read_text())["trainer/global_step"] == 8


@pytest.mark.slow
def test_sharded_predictions_equal_those_of_one_process(task, tmp_path):
    changes = {"model__init_args__generation": {"max_new_tokens": 6}}
    one, arguments = task("full", "one", **changes)
    assert main(["fit", *arguments]) == 0 and main(["predict", *arguments, "--ckpt_path", "last"]) == 0
    two, arguments = task("full", "two", 2, "fsdp", **changes)
    with_two([*arguments, "--ckpt_path", str(one.resolve("last"))], "predict")
    assert two.predictions.read_text() == one.predictions.read_text()
