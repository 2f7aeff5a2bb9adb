"""What follows from a plan: bounds, remedies in their order, the first that fits."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import LlamaConfig

from lmmods.commands.plan import find_fitting_variant
from lmmods.core.hardware import target_named
from lmmods.core.memory import score_flops
from lmmods.core.plan import GIB, Drawing, StepPlan, Traffic, Variant, remedies
from tests.forks import together

RECIPE = Variant(rows=8, accumulated=2, checkpointing=False, strategy="auto", quantize=None, lora=None)
EIGHT = target_named("8xH100")


def plan(gibibytes: float, **changes) -> StepPlan:
    return replace(StepPlan(EIGHT, "compiled", {"temporaries": int(gibibytes * GIB)}, {}, 60 * GIB, None, {}, 0.0,
                            "bfloat16", 1000, 8), **changes)


def test_a_step_takes_as_long_as_the_slowest_of_its_bounds():
    """989.4 TFLOP at peak are a second; so are 450 GB of an all-reduce, of which 7/8 are sent twice."""
    found = plan(1, flops=989.4e12, traffic={"all-reduce": Traffic(3, int(450e9 * 8 / 14), 8)},
                 memory={"parameters": int(3350e9 / 4), "temporaries": 5})
    assert found.bounds() == pytest.approx({"arithmetic": 1, "links": 1, "memory": 0.5})
    few = {"all-reduce of 2": Traffic(1, int(450e9), 2), "all-gather of 2": Traffic(1, int(50e9), 2, span=9)}
    assert plan(1, traffic=few).bounds()["links"] == pytest.approx(1 + 0.5)  # the second over the network
    assert any("1,000 tokens per second" in line for line in found.lines(7200))
    assert any("2 hours, 16 device-hours" in line for line in found.lines(7200))
    assert plan(1, target=target_named("cpu")).bounds() == {}


@pytest.mark.parametrize(("gap", "verdict"), [
    (20, "fits: about 10.00 GiB"), (11, "fits, but only just: about 10.00 GiB"), (9, "does not fit: about 10.00 GiB")])
def test_temporaries_are_one_block(gap, verdict):
    first = next(plan(10, gap=gap * GIB).lines(1))
    assert verdict in first and (f"largest free block has {gap}.00 GiB" in first) is (gap < 20)


def test_drawing_reads_weights_and_cache_for_each_token():
    """By hand: 5 answers, 2 at once, of 3 tokens after prompts of 4, in two layers, one with a window of 5 tokens."""
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, head_dim=16)
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"], 5
    of_token = 2 * 2 * 16 * 2  # key and value of a layer: 2 heads of 16 features in 2 bytes
    found = Drawing.of(config, 5, 2, 4, (7, 3), 2, [("embed", 1000.0), ("experts.up", 500.0)])
    assert found.weights == 1500 and found.held == of_token * (7 + 5)
    assert found.cache == of_token * ((4 + 5 + 6) + (4 + 5 + 5))
    target = target_named("8xH100")
    assert found.seconds(target) == pytest.approx((3 * 3 * 1500 + 5 * found.cache) / 3350e9 / 4)
    sharded = replace(found, gathered=8e9, group=8)
    assert sharded.seconds(target) == pytest.approx(3 * 3 * 7e9 / 450e9 / 4)
    assert Drawing.of(config, 5, 9, 4, (7, 3), 2, []).at_once == 5 and found.seconds(target_named("cpu")) is None
    config.num_local_experts, config.num_experts_per_tok = 8, 1
    assert Drawing.of(config, 5, 2, 4, (7, 3), 2, [("embed", 1000.0), ("experts.up", 500.0)]).weights == 1000 + 125
    halved = Drawing.of(config, 5, 2, 4, (7, 3), 2, [("embed", 1000.0)], num_devices=2)
    assert (halved.weights, halved.cache, halved.held) == (500, found.cache / 2, found.held / 2)


def test_the_time_of_drawing_comes_on_top():
    """3350 GB of memory are read in a second."""
    drawing = Drawing(16, 8, 2, 10, weights=3350e9 / 20, cache=0.0, held=GIB, gathered=0.0)
    found = plan(1, flops=989.4e12, drawing=drawing)
    lines = list(found.lines(7200))
    assert any("16 on each device that samples, for 2 steps, 8 at once, whose keys and values take 8.00 GiB" in line
               for line in lines)
    assert any(line.endswith("1.5 s (1 s to train: arithmetic 1 s, links 0 ms, memory 0 ms; 500 ms to sample answers)")
               for line in lines)
    assert any("33% of it, if all answers have 10 tokens" in line for line in lines)
    assert any("667 tokens per second" in line for line in lines) and any("3 hours" in line for line in lines)
    nowhere = list(replace(found, target=target_named("cpu")).lines(1))
    assert any("not bounded" in line for line in nowhere) and any("8 at once" in line for line in nowhere)


@pytest.mark.parametrize(("engine", "on"), [
    ("torch", "8xRTX3090"), pytest.param("jax", "2xcpu", marks=pytest.mark.slow)])
def test_reinforcement_learning_is_planned(engine, on, tmp_path):
    """A step of the target's ranks, whose number of prompts the recipe names, off policy and with a reference."""
    ranks = int(on[0])
    # In a process where JAX has not started with its one device.
    [said] = together(["plan", "--config", "configs/grpo.yaml", "--engine", engine, "--on", on,
                       "--data.batch_size", "4", "--model.prompts_per_step", str(ranks), "--model.num_iterations", "2",
                       "--model.beta", "0.1", "--trainer.max_steps", "-1", "--trainer.max_epochs", "1",
                       "--model.rewards", "[{name: f1}]", "--trainer.default_root_dir", str(tmp_path)])
    assert f"4 x 2 rows on each of {ranks}" in said and "fits" in said
    on_device = 8 if engine == "torch" else 16
    assert f"{on_device} on each device that samples, for 2 steps, {on_device} at once" in said
    if engine == "torch":
        # 2400 prompts, 8 a step, each step twice; 24 GB at 936 GB/s
        assert "600 steps" in said and "to sample answers" in said
    else:
        assert "not bounded" in said


def test_the_tpus_compiler_has_the_last_word():
    v5e = target_named("v5e-16")
    assert plan(70, target=v5e).fits and not plan(1, target=v5e, refusal="Ran out of memory in memory space hbm.").fits
    assert not plan(70, target=v5e, source="simulated").fits and not plan(70).fits


@pytest.mark.parametrize("causal", [True, False])
def test_scores_count_the_pairs_that_see_each_other(causal):
    """Two products forward, of two operations for each feature."""
    far = np.subtract.outer(np.arange(9), np.arange(9))
    seen = sum(int((((far >= 0) | (not causal)) & (abs(far) < (window or 99))).sum()) for window in (None, 4, 20))
    assert score_flops(9, (None, 4, 20), 32, causal) == 4 * 32 * seen


class Planner:
    """Memory by a rule; counts what it is asked for."""

    on, may_shard = EIGHT, True

    def __init__(self, needs):
        self.needs, self.asked = needs, []

    def plan(self, variant):
        self.asked.append(variant)
        return plan(self.needs(variant))


@pytest.mark.parametrize(("needs", "changed", "rows"), [
    (lambda v: 14 * v.rows, ("data.batch_size: 4, trainer.accumulate_grad_batches: 4",), 4),
    (lambda v: 200 if not v.checkpointing else 7 * v.rows, ("model.gradient_checkpointing: true",), 8),
    (lambda v: 50 + v.rows + 100 * (v.strategy != "fsdp"), ("trainer.strategy: fsdp",), 8),
    (lambda v: 40 + 4 * v.rows + 100 * (v.quantize is None), ("model.quantize: nf4",
     "data.batch_size: 4, trainer.accumulate_grad_batches: 4"), 4),
    (lambda v: 61, None, None)], ids=["rows", "checkpointing", "sharding", "quantised", "nothing"])
def test_the_first_change_that_fits_is_named(needs, changed, rows):
    found = find_fitting_variant(Planner(needs), RECIPE, plan(needs(RECIPE)), may_quantize=True)
    if changed is None:
        assert found is None
        return
    variant, _ = found
    assert set(changed) <= set(variant.changed) and variant.rows == rows
    assert variant.rows * variant.accumulated == RECIPE.rows * RECIPE.accumulated


def test_fewer_rows_are_not_tried_where_parameters_alone_are_too_large():
    class Large(Planner):
        def plan(self, variant):
            self.asked.append(variant)
            return plan(0, memory={"parameters": int((8 if variant.strategy == "fsdp" else 64) * GIB), "rows": 1})

    planner = Large(None)
    variant, _ = find_fitting_variant(planner, RECIPE, planner.plan(RECIPE), may_quantize=True)
    assert planner.asked[1:] == [variant] and variant.strategy == "fsdp" and variant.rows == RECIPE.rows


def test_what_a_recipe_has_is_no_remedy():
    sharded = replace(RECIPE, checkpointing=True, strategy="fsdp")
    assert remedies(sharded, 8, may_quantize=False) == []
    assert remedies(replace(RECIPE, checkpointing=True), 8, may_quantize=False, may_shard=False) == []
    assert [each.quantize for each in remedies(sharded, 1, may_quantize=True)] == ["nf4"]
    assert [each.rows for each in replace(RECIPE, rows=6).smaller()] == [3, 1]
