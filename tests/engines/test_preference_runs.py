"""Preference runs on both engines: adapters as references, stops anywhere, engines in turn."""

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
from tests.engines.test_reference_cache import CACHE, arguments, fit, select_losses  # noqa: F401 - fixtures
from tests.finished_runs import assert_same_run, rows
from tests.interruptions import stop_jax_at

QLORA = {"model__init_args__quantize": "nf4", "model__init_args__lora": {"rank": 4, "dropout": 0.1},
         "model__init_args__optimizer": {"lr": 0.01}, "model__init_args__gradient_checkpointing": True,
         "data__init_args__group_by_length": True}


@pytest.fixture
def stop_anywhere(stop_at, monkeypatch):
    """Return `stop_at` for both engines."""
    stop_jax = stop_jax_at(monkeypatch)
    return lambda batches: (stop_jax(batches), stop_at(batches))


# Adapters as references ----------------------------------------------------------------------------------------------


@pytest.fixture
def sft_adapter(llama_folder, tmp_path):
    """Save an adapter that differs clearly from the base, as from an earlier run."""
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


def compute_bare_logps(folder, adapter, batch):
    """Compute log-probabilities [B, 2] with transformers and PEFT alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model = (PeftModel.from_pretrained(model, adapter) if adapter else model).eval()
    ids, mask, labels = (batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "labels"))
    with torch.no_grad():
        logps = F.log_softmax(model(input_ids=ids, attention_mask=mask).logits[:, :-1], -1)
    logps = logps.gather(2, labels[:, 1:, None].clamp(min=0))[..., 0] * (labels[:, 1:] >= 0)
    return logps.sum(1).view(batch["labels"].shape[:2])


@pytest.mark.parametrize(("engine", "reference"), [
    ("torch", None), *(pytest.param(*case, marks=pytest.mark.slow) for case in
                       [("torch", "base"), ("jax", None), ("jax", "cache")])])
def test_the_reference_of_a_given_adapter_is_that_adapter_by_default(  # noqa: PLR0913
        fit, pairs, llama_folder, sft_adapter, engine, reference):  # noqa: F811
    """With `reference: base`, it is the base. PEFT computes the last validation again."""
    run = fit("run", engine=engine, model__init_args__adapter=sft_adapter, model__init_args__reference=reference,
              model__init_args__optimizer={"lr": 0.01}, data__init_args__val_source=pairs, data__init_args__val_size=0)
    data = PreferenceData(source=pairs, max_length=256, batch_size=8, shuffle=False, template="alpaca")
    data.connect(pretrained=str(llama_folder), seed=7)
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_batches()))
    policy = compute_bare_logps(llama_folder, run.model, batch)
    reference_logps = compute_bare_logps(llama_folder, None if reference == "base" else sft_adapter, batch)
    values, metrics = PreferenceLoss().of_pairs(OPERATIONS, policy, (batch["labels"] >= 0).sum(-1), reference_logps)
    final_metrics = json.loads(run.metrics_json.read_text())
    assert final_metrics["val/loss"] == pytest.approx(values.mean().item(), rel=1e-5, abs=1e-6)
    for name, (value, _) in metrics.items():
        assert final_metrics[f"val/{name}"] == pytest.approx(value.mean().item(), rel=1e-4, abs=1e-5)
    assert abs(final_metrics["val/rewards/margin"]) > 0.05


# Quantised bases -----------------------------------------------------------------------------------------------------


# Each quantisation and each reference on both engines, but not all combinations.
BASES = [("torch", None, "base", False), ("torch", None, "cache", False), ("torch", "nf4", "copy", False),
         ("torch", "nf4", "base", True), ("torch", "fp4", "cache", False), ("torch", "int8", "base", False),
         ("torch", "int8", "copy", False), ("jax", None, "base", False), ("jax", "nf4", "base", True),
         ("jax", "fp4", "base", False), ("jax", "int8", "base", False), ("jax", "int8", "cache", False)]


@pytest.mark.parametrize(("engine", "quantize", "reference", "dora"), [
    pytest.param(*case, marks=[] if case == ("torch", "int8", "base", False) else pytest.mark.slow,
                 id="-".join([case[0], case[1] or "plain", case[2], *["dora"] * case[3]])) for case in BASES])
def test_policy_and_reference_start_equal_under_any_batch_split(  # noqa: PLR0913
        fit, pairs, engine, quantize, reference, dora):  # noqa: F811
    """The first loss is ln 2 and every pair a tie, for any quantisation; then both engines take the same steps."""
    def run(engine, rows_at_once, **changes):
        return rows(fit(f"{engine}-{rows_at_once}-{len(changes)}", **{
            "engine": engine, "model__init_args__quantize": quantize, "model__init_args__reference": reference,
            "model__init_args__lora": {"rank": 4, "dropout": 0.1, "dora": dora},
            "model__init_args__optimizer": {"name": "sgd", "lr": 1.0}, "data__init_args__val_source": pairs,
            "data__init_args__val_size": 0, "data__init_args__batch_size": rows_at_once,
            "trainer__accumulate_grad_batches": 8 // rows_at_once, "trainer__gradient_clip_val": 1.0,
            "trainer__max_steps": 3, "trainer__val_check_interval": 24 // rows_at_once, **changes}))

    expected_rows = run("torch", 8)
    other_runs = [run(engine, size) for size in ((2, 1) if engine == "torch" else (8, 2))]
    if engine == "torch":
        other_runs.append(run("torch", 8, model__init_args__fast_kernels=False))
    for metrics in (expected_rows, *other_runs):
        assert metrics[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert metrics[0]["train/rewards/accuracy"] == 0.5
        for row, expected in zip(metrics, expected_rows, strict=True):
            assert select_losses(row) == pytest.approx(select_losses(expected), abs=1e-5)
            assert row == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert expected_rows[-1]["val/loss"] < math.log(2) - 0.1


# Stops and engines ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "changes"), [("torch", CACHE), ("torch", QLORA), ("jax", QLORA)],
                         ids=["torch, cached", "torch, qlora", "jax, qlora"])
def test_a_run_stopped_anywhere_ends_with_the_same_bits(  # noqa: PLR0913
        fit, arguments, tmp_path, stop_anywhere, engine, changes):  # noqa: F811
    """With KTO, whose baseline is computed over a step; the cache is deleted before each resume."""
    changes = {"engine": engine, "model__init_args__loss": "kto", "trainer__accumulate_grad_batches": 3,
               "trainer__limit_val_batches": 0, **changes}
    whole = fit("whole", **changes)
    num_done, options = 0, []
    for batch in (1, 3, 5, 8):
        stop_anywhere(batch - num_done)
        assert main(["fit", *arguments("broken", **changes), *options]) == 130, batch
        num_done, options = batch, ["--ckpt_path", "last"]
        shutil.rmtree(tmp_path / "cache")
    stop_anywhere(0)
    assert_same_run(fit("broken", *options, **changes), whole)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "changes"), [("sigmoid", QLORA), ("kto", CACHE)], ids=["sigmoid", "kto"])
def test_a_run_switches_engines_inside_steps(fit, arguments, stop_anywhere, loss, changes):  # noqa: F811
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
        assert select_losses(one) == pytest.approx(select_losses(other), rel=1e-4, abs=1e-5)
