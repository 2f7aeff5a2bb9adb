"""Whole runs of preference optimisation on both engines: adapters on adapters, stops anywhere, engines in turn."""

import json
import math
import shutil

import pytest
import torch
from torch.nn import functional as F

from lmmods.cli import main
from lmmods.core.preference_losses import PreferenceLoss
from lmmods.data.preference import PreferenceData
from lmmods.torch_engine.tasks.preference import OPERATIONS
from tests.engines.test_reference_cache import CACHE, arguments, fit, losses  # noqa: F401 - fixtures
from tests.finished_runs import assert_same_run, rows
from tests.interruptions import stop_jax_at

QLORA = {"model__init_args__quantize": "nf4", "model__init_args__lora": {"rank": 4, "dropout": 0.1},
         "model__init_args__optimizer": {"lr": 0.01}, "model__init_args__gradient_checkpointing": True,
         "data__init_args__group_by_length": True}


@pytest.fixture
def stop_anywhere(stop_at, monkeypatch):
    """`stop_at` of both engines."""
    stop_jax = stop_jax_at(monkeypatch)
    return lambda batches: (stop_jax(batches), stop_at(batches))


# Adapters on adapters ------------------------------------------------------------------------------------------------


@pytest.fixture
def sft_adapter(llama_folder, tmp_path):
    """An adapter far from the base, as an earlier run leaves it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(llama_folder), LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1)
    model.save_pretrained(tmp_path / "sft")
    return str(tmp_path / "sft")


def bare_logps(folder, adapter, batch):
    """[B, 2], by transformers and PEFT alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model = (PeftModel.from_pretrained(model, adapter) if adapter else model).eval()
    ids, mask, labels = (batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "labels"))
    with torch.no_grad():
        found = F.log_softmax(model(input_ids=ids, attention_mask=mask).logits[:, :-1], -1)
    found = found.gather(2, labels[:, 1:, None].clamp(min=0))[..., 0] * (labels[:, 1:] >= 0)
    return found.sum(1).view(batch["labels"].shape[:2])


@pytest.mark.parametrize(("engine", "reference"), [
    ("torch", None), *(pytest.param(*case, marks=pytest.mark.slow) for case in
                       [("torch", "base"), ("jax", None), ("jax", "cache")])])
def test_an_adapter_that_goes_on_is_compared_with_itself(  # noqa: PLR0913
        fit, pairs, llama_folder, sft_adapter, engine, reference):  # noqa: F811
    """Or with the base, where a recipe says so. The last validation, computed again by PEFT."""
    run = fit("run", engine=engine, model__init_args__adapter=sft_adapter, model__init_args__reference=reference,
              model__init_args__optimizer={"lr": 0.01}, data__init_args__val_source=pairs, data__init_args__val_size=0)
    data = PreferenceData(source=pairs, max_length=256, batch_size=8, shuffle=False, template="alpaca")
    data.connect(pretrained=str(llama_folder), seed=7)
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_batches()))
    policy = bare_logps(llama_folder, run.model, batch)
    compared = bare_logps(llama_folder, None if reference == "base" else sft_adapter, batch)
    found, metrics = PreferenceLoss().of_pairs(OPERATIONS, policy, (batch["labels"] >= 0).sum(-1), compared)
    last = json.loads(run.metrics_json.read_text())
    assert last["val/loss"] == pytest.approx(found.mean().item(), rel=1e-5, abs=1e-6)
    for name, (value, _) in metrics.items():
        assert last[f"val/{name}"] == pytest.approx(value.mean().item(), rel=1e-4, abs=1e-5)
    assert abs(last["val/rewards/margin"]) > 0.05


# Quantised bases -----------------------------------------------------------------------------------------------------


# Each way to store a base and each reference on both engines, but not each with each.
BASES = [("torch", None, "base", False), ("torch", None, "cache", False), ("torch", "nf4", "copy", False),
         ("torch", "nf4", "base", True), ("torch", "fp4", "cache", False), ("torch", "int8", "base", False),
         ("torch", "int8", "copy", False), ("jax", None, "base", False), ("jax", "nf4", "base", True),
         ("jax", "fp4", "base", False), ("jax", "int8", "base", False), ("jax", "int8", "cache", False)]


@pytest.mark.parametrize(("engine", "quantize", "reference", "dora"), [
    pytest.param(*case, marks=[] if case == ("torch", "int8", "base", False) else pytest.mark.slow,
                 id="-".join([case[0], case[1] or "plain", case[2], *["dora"] * case[3]])) for case in BASES])
def test_policy_and_reference_are_one_network_under_every_cut(  # noqa: PLR0913
        fit, pairs, engine, quantize, reference, dora):  # noqa: F811
    """So the first loss is ln 2 and every pair a tie, whatever the base is stored in; then both engines go one way."""
    def run(engine, rows_at_once, **changes):
        return rows(fit(f"{engine}-{rows_at_once}-{len(changes)}", **{
            "engine": engine, "model__init_args__quantize": quantize, "model__init_args__reference": reference,
            "model__init_args__lora": {"rank": 4, "dropout": 0.1, "dora": dora},
            "model__init_args__optimizer": {"name": "sgd", "lr": 1.0}, "data__init_args__val_source": pairs,
            "data__init_args__val_size": 0, "data__init_args__batch_size": rows_at_once,
            "trainer__accumulate_grad_batches": 8 // rows_at_once, "trainer__gradient_clip_val": 1.0,
            "trainer__max_steps": 3, "trainer__val_check_interval": 24 // rows_at_once, **changes}))

    wanted = run("torch", 8)
    others = [run(engine, size) for size in ((2, 1) if engine == "torch" else (8, 2))]
    if engine == "torch":
        others.append(run("torch", 8, model__init_args__fast_kernels=False))
    for found in (wanted, *others):
        assert found[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert found[0]["train/rewards/accuracy"] == 0.5
        for row, expected in zip(found, wanted, strict=True):
            assert losses(row) == pytest.approx(losses(expected), abs=1e-5)
            assert row == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert wanted[-1]["val/loss"] < math.log(2) - 0.1


# Stops and engines ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "changes"), [("torch", CACHE), ("torch", QLORA), ("jax", QLORA)],
                         ids=["torch, cached", "torch, qlora", "jax, qlora"])
def test_a_run_that_is_stopped_anywhere_is_the_straight_one(  # noqa: PLR0913
        fit, arguments, tmp_path, stop_anywhere, engine, changes):  # noqa: F811
    """KTO has a baseline, too, which is that of a whole step; the cache is gone at each start."""
    changes = {"engine": engine, "model__init_args__loss": "kto", "trainer__accumulate_grad_batches": 3,
               "trainer__limit_val_batches": 0, **changes}
    whole = fit("whole", **changes)
    done, again = 0, []
    for place in (1, 3, 5, 8):
        stop_anywhere(place - done)
        assert main(["fit", *arguments("broken", **changes), *again]) == 130, place
        done, again = place, ["--ckpt_path", "last"]
        shutil.rmtree(tmp_path / "cache")
    stop_anywhere(0)
    assert_same_run(fit("broken", *again, **changes), whole)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "changes"), [("sigmoid", QLORA), ("kto", CACHE)], ids=["sigmoid", "kto"])
def test_engines_take_turns_within_steps(fit, arguments, stop_anywhere, loss, changes):  # noqa: F811
    changes = {"model__init_args__loss": loss, "trainer__accumulate_grad_batches": 3, "trainer__max_steps": 6,
               "trainer__limit_val_batches": 0, **changes}
    straight = fit("straight", engine="torch", **changes)
    stop_anywhere(4)
    assert main(["fit", *arguments("turns", engine="torch", **changes)]) == 130
    stop_anywhere(3)
    assert main(["fit", *arguments("turns", engine="jax", **changes), "--ckpt_path", "last"]) == 130
    stop_anywhere(0)
    turns = fit("turns", "--ckpt_path", "last", engine="torch", **changes)
    for one, other in zip(rows(straight), rows(turns), strict=True):
        assert losses(one) == pytest.approx(losses(other), rel=1e-4, abs=1e-5)
