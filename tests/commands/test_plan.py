"""Plans: bounds of a step, remedies in their order, and the first one that fits."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import LlamaConfig

from lmmods.commands.plan import find_fitting_variant
from lmmods.core.hardware import target_named
from lmmods.core.memory import score_flops
from lmmods.core.plan import GIB, SamplingPlan, StepPlan, Traffic, Variant, remedies
from tests.forks import together

RECIPE = Variant(rows=8, accumulated=2, checkpointing=False, strategy="auto", quantize=None, lora=None)
EIGHT = target_named("8xH100")


def build_plan(gibibytes: float, **changes) -> StepPlan:
    return replace(StepPlan(EIGHT, "compiled", {"temporaries": int(gibibytes * GIB)}, {}, 60 * GIB, None, {}, 0.0,
                            "bfloat16", 1000, 8), **changes)


def test_the_bounds_of_a_step_follow_from_compute_links_and_memory():
    """989.4 TFLOP at peak take a second; so do 450 GB of an all-reduce, which sends 7/8 of its data twice."""
    step_plan = build_plan(1, flops=989.4e12, traffic={"all-reduce": Traffic(3, int(450e9 * 8 / 14), 8)},
                           memory={"parameters": int(3350e9 / 4), "temporaries": 5})
    assert step_plan.bounds() == pytest.approx({"arithmetic": 1, "links": 1, "memory": 0.5})
    few = {"all-reduce of 2": Traffic(1, int(450e9), 2), "all-gather of 2": Traffic(1, int(50e9), 2, span=9)}
    assert build_plan(1, traffic=few).bounds()["links"] == pytest.approx(1 + 0.5)  # the second crosses machines
    assert any("1,000 tokens per second" in line for line in step_plan.lines(7200))
    assert any("2 hours, 16 device-hours" in line for line in step_plan.lines(7200))
    assert build_plan(1, target=target_named("cpu")).bounds() == {}


@pytest.mark.parametrize(("gap", "verdict"), [
    (20, "fits: about 10.00 GiB"), (11, "fits, but only just: about 10.00 GiB"), (9, "does not fit: about 10.00 GiB")])
def test_temporaries_must_fit_in_the_largest_free_block(gap, verdict):
    first = next(build_plan(10, gap=gap * GIB).lines(1))
    assert verdict in first and (f"largest free block has {gap}.00 GiB" in first) is (gap < 20)


def test_sampling_reads_weights_and_cache_for_every_token():
    """By hand: 5 answers of 3 tokens, 2 at once, prompts of 4 tokens, two layers, one with a window of 5 tokens."""
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, head_dim=16)
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"], 5
    token_bytes = 2 * 2 * 16 * 2  # keys and values of a layer: 2 heads of 16 features, 2 bytes each
    sampling = SamplingPlan.of(config, 5, 2, 4, (7, 3), 2, [("embed", 1000.0), ("experts.up", 500.0)])
    assert sampling.weights == 1500 and sampling.held == token_bytes * (7 + 5)
    assert sampling.cache == token_bytes * ((4 + 5 + 6) + (4 + 5 + 5))
    target = target_named("8xH100")
    assert sampling.seconds(target) == pytest.approx((3 * 3 * 1500 + 5 * sampling.cache) / 3350e9 / 4)
    sharded = replace(sampling, gathered=8e9, group=8)
    assert sharded.seconds(target) == pytest.approx(3 * 3 * 7e9 / 450e9 / 4)
    assert SamplingPlan.of(config, 5, 9, 4, (7, 3), 2, []).at_once == 5
    assert sampling.seconds(target_named("cpu")) is None
    config.num_local_experts, config.num_experts_per_tok = 8, 1
    assert SamplingPlan.of(config, 5, 2, 4, (7, 3), 2, [("embed", 1000.0), ("experts.up", 500.0)]).weights == 1000 + 125
    halved = SamplingPlan.of(config, 5, 2, 4, (7, 3), 2, [("embed", 1000.0)], num_devices=2)
    assert (halved.weights, halved.cache, halved.held) == (500, sampling.cache / 2, sampling.held / 2)


def test_the_time_of_sampling_is_added_to_the_step():
    """The target reads 3350 GB of memory per second."""
    sampling = SamplingPlan(16, 8, 2, 10, weights=3350e9 / 20, cache=0.0, held=GIB, gathered=0.0)
    step_plan = build_plan(1, flops=989.4e12, sampling=sampling)
    lines = list(step_plan.lines(7200))
    assert any("16 on each device that samples, for 2 steps, 8 at once, whose keys and values take 8.00 GiB" in line
               for line in lines)
    assert any(line.endswith("1.5 s (1 s to train: arithmetic 1 s, links 0 ms, memory 0 ms; 500 ms to sample answers)")
               for line in lines)
    assert any("33% of it, if all answers have 10 tokens" in line for line in lines)
    assert any("667 tokens per second" in line for line in lines) and any("3 hours" in line for line in lines)
    nowhere = list(replace(step_plan, target=target_named("cpu")).lines(1))
    assert any("not bounded" in line for line in nowhere) and any("8 at once" in line for line in nowhere)


@pytest.mark.parametrize(("engine", "target"), [
    ("torch", "8xRTX3090"), pytest.param("jax", "2xcpu", marks=pytest.mark.slow)])
def test_a_grpo_run_is_planned(engine, target, tmp_path):
    """A step on all ranks of the target, with prompts_per_step, off-policy passes and a reference model."""
    ranks = int(target[0])
    # In a new process, because JAX here has already started with one device.
    [output] = together(["plan", "--config", "configs/grpo.yaml", "--engine", engine, "--on", target,
                         "--data.batch_size", "4", "--model.prompts_per_step", str(ranks),
                         "--model.num_iterations", "2", "--model.beta", "0.1", "--trainer.max_steps", "-1",
                         "--trainer.max_epochs", "1", "--model.rewards", "[{name: f1}]",
                         "--trainer.default_root_dir", str(tmp_path)])
    assert f"4 x 2 rows on each of {ranks}" in output and "fits" in output
    answers = 8 if engine == "torch" else 16
    assert f"{answers} on each device that samples, for 2 steps, {answers} at once" in output
    if engine == "torch":
        # 2400 prompts, 8 per step, two passes: 600 steps; 24 GB at 936 GB/s
        assert "600 steps" in output and "to sample answers" in output
    else:
        assert "not bounded" in output


def test_the_tpu_compiler_decides_whether_a_step_fits():
    v5e = target_named("v5e-16")
    assert build_plan(70, target=v5e).fits
    assert not build_plan(1, target=v5e, refusal="Ran out of memory in memory space hbm.").fits
    assert not build_plan(70, target=v5e, source="simulated").fits and not build_plan(70).fits


@pytest.mark.parametrize("causal", [True, False])
def test_attention_flops_count_the_visible_pairs(causal):
    """Two products in the forward pass, with two operations per feature."""
    distance = np.subtract.outer(np.arange(9), np.arange(9))
    num_pairs = sum(int((((distance >= 0) | (not causal)) & (abs(distance) < (window or 99))).sum())
                    for window in (None, 4, 20))
    assert score_flops(9, (None, 4, 20), 32, causal) == 4 * 32 * num_pairs


class Planner:
    """Computes memory with a function and records the requested variants."""

    on, may_shard = EIGHT, True

    def __init__(self, needs):
        self.needs, self.requested = needs, []

    def plan(self, variant):
        self.requested.append(variant)
        return build_plan(self.needs(variant))


@pytest.mark.parametrize(("needs", "changed", "rows"), [
    (lambda v: 14 * v.rows, ("data.batch_size: 4, trainer.accumulate_grad_batches: 4",), 4),
    (lambda v: 200 if not v.checkpointing else 7 * v.rows, ("model.gradient_checkpointing: true",), 8),
    (lambda v: 50 + v.rows + 100 * (v.strategy != "fsdp"), ("trainer.strategy: fsdp",), 8),
    (lambda v: 40 + 4 * v.rows + 100 * (v.quantize is None), ("model.quantize: nf4",
     "data.batch_size: 4, trainer.accumulate_grad_batches: 4"), 4),
    (lambda v: 61, None, None)], ids=["rows", "checkpointing", "sharding", "quantised", "nothing"])
def test_the_first_change_that_fits_is_suggested(needs, changed, rows):
    fitting = find_fitting_variant(Planner(needs), RECIPE, build_plan(needs(RECIPE)), may_quantize=True)
    if changed is None:
        assert fitting is None
        return
    variant, _ = fitting
    assert set(changed) <= set(variant.changed) and variant.rows == rows
    assert variant.rows * variant.accumulated == RECIPE.rows * RECIPE.accumulated


def test_fewer_rows_are_not_tried_if_the_parameters_alone_are_too_large():
    class Large(Planner):
        def plan(self, variant):
            self.requested.append(variant)
            return build_plan(0, memory={"parameters": int((8 if variant.strategy == "fsdp" else 64) * GIB), "rows": 1})

    planner = Large(None)
    variant, _ = find_fitting_variant(planner, RECIPE, planner.plan(RECIPE), may_quantize=True)
    assert planner.requested[1:] == [variant] and variant.strategy == "fsdp" and variant.rows == RECIPE.rows


def test_a_setting_of_the_recipe_is_not_a_remedy():
    sharded = replace(RECIPE, checkpointing=True, strategy="fsdp")
    assert remedies(sharded, 8, may_quantize=False) == []
    assert remedies(replace(RECIPE, checkpointing=True), 8, may_quantize=False, may_shard=False) == []
    assert [variant.quantize for variant in remedies(sharded, 1, may_quantize=True)] == ["nf4"]
    assert [variant.rows for variant in replace(RECIPE, rows=6).smaller()] == [3, 1]
