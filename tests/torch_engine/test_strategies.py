"""Supported strategies, what they reject, and generation with sharded parameters."""

import shutil
from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from transformers import AutoModelForCausalLM

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.torch_engine.strategies.fsdp2 import FSDP2
from lmmods.torch_engine.trainer import choose_strategy
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.engines.test_distributed import same_figures, same_weights, task, with_two  # noqa: F401 - a fixture


def test_supported_strategies_are_chosen():
    for strategy in ("auto", "ddp", DDPStrategy(), FSDP2()):
        assert choose_strategy(strategy) is strategy
    assert isinstance(choose_strategy("fsdp"), FSDP2)


@pytest.mark.parametrize(("strategy", "instead"), [(ModelParallelStrategy, "FSDP2"), (FSDPStrategy, "fsdp")])
def test_unsupported_strategies_are_rejected_by_name(strategy, instead):
    with pytest.raises(UserError, match=f"{strategy.__name__} is not supported.*{instead}"):
        choose_strategy(strategy())


def test_an_unsupported_strategy_ends_the_command_with_one_message(recipe, capsys):
    strategy = {"class_path": "lightning.pytorch.strategies.FSDPStrategy"}
    assert main(["fit", *recipe(trainer__strategy=strategy)]) == 2
    assert capsys.readouterr().err.startswith("error: trainer.strategy: FSDPStrategy is not supported")


@pytest.mark.parametrize(("quantize", "optimizer", "message"), [
    ("int8", "adamw", "model.quantize int8"), (None, "adafactor", "optimizer.name adafactor"),
    ("nf4", "paged_adamw_32bit", "optimizer.name paged_adamw_32bit"),
])
def test_settings_that_cannot_be_sharded_are_rejected_by_name(quantize, optimizer, message):
    module = SimpleNamespace(quantize=quantize, optimizer=SimpleNamespace(name=optimizer))
    with pytest.raises(UserError, match=message):
        FSDP2().check_run(module)


@pytest.mark.slow
def test_two_processes_take_the_sgd_steps_of_one(task):  # noqa: F811
    changes = {"model__init_args__optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9}}
    one, arguments = task("full", "one", **changes)
    assert main(["fit", *arguments]) == 0
    two, arguments = task("full", "two", 2, "fsdp", **changes)
    with_two(arguments)
    same_figures(two, one, rel=1e-4)
    same_weights(two.resolve("last") / "model.safetensors", one.resolve("last") / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {}, {"num_beams": 2}, {"penalty_alpha": 0.5, "top_k": 4},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
], ids=["greedy", "beams", "contrastive", "groups"])
def test_processes_generate_together_until_all_answers_end(task, llama_folder, tmp_path, options):  # noqa: F811
    """If one process stopped early, the other would wait for its shard of the parameters forever."""
    folder = tmp_path / "talkative"
    shutil.copytree(llama_folder, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data[model.config.eos_token_id] *= 3  # so that some rows end early
    model.save_pretrained(folder)
    changes = {"model__init_args__generation": {"max_new_tokens": 12, **options},
               "model__init_args__pretrained": str(folder), "data__init_args__batch_size": 1}
    one, arguments = task("full", "one", **changes)
    assert main(["predict", *arguments]) == 0
    lines = one.predictions.read_text().splitlines()
    assert len({len(line) for line in lines}) > 1
    two, arguments = task("full", "two", 2, "fsdp", **changes)
    with_two(arguments, "predict")
    assert two.predictions.read_text().splitlines() == lines
