"""Plans on JAX: collectives counted in programs, and recipes planned on simulated devices."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_engine.planning import collectives, tpu_rings, tpu_shape
from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.core.hardware import target_named
from lmmods.core.plan import Traffic
from tests.forks import together
from tests.jax_engine.measured_memory import compare

FEW_ROWS = {"clm": "demo/corpus/val.txt", "mlm": "demo/corpus/val.txt", "sft_qlora": "demo/instructions_heldout.jsonl"}
LAYERS, WIDTH = 5, 64
MODEL = "{model_type: llama, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 8}"


def test_a_collective_in_a_loop_counts_once_per_iteration():
    """Each layer gathers its matrix forward and backward and reduces its gradient."""
    mesh = jax.make_mesh((1, 8), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])

    def loss(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].sum()

    def describe(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    program = jax.jit(jax.grad(loss)).lower(describe((LAYERS, WIDTH, WIDTH), None, None, "fsdp"),
                                            describe((16, WIDTH), "fsdp")).compile()
    matrix = 4 * WIDTH * WIDTH
    assert collectives(program.as_text()) == ({"all-gather": Traffic(2 * LAYERS, 2 * LAYERS * matrix, 8),
                                               "all-reduce": Traffic(LAYERS, LAYERS * matrix, 8)}, 0)


TPU = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8]{0:T(256)}) while(%t), condition=%below, body=%body
}
%below (c: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(40)
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}
%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %start = f32[8]{0:T(256)} fusion(%x), kind=kCustom, calls=%started
  %done = f32[8]{0:T(256)} fusion(%x), kind=kCustom, calls=%ended
  %reduced = ((bf16[16]{0}), bf16[4]{0}) reduce-scatter-start(%y), channel_id=3, replica_groups=[2,4]<=[8]
}
%started (x: f32[2]) -> f32[8] {
  ROOT %g = f32[8]{0:T(256)} all-gather(%x), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}
%ended (x: f32[2]) -> f32[8] {
  ROOT %g.1 = f32[8]{0:T(256)} all-gather(%x), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}
"""
SCATTER = """
ENTRY %main (p: bf16[64,8]) -> bf16[16,8] {
  ROOT %scattered = bf16[16,8]{1,0:T(8,128)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.2
}
%all-reduce-scatter.2 (input: bf16[64,8]) -> bf16[16,8] {
  %sum = bf16[64,8]{1,0:T(8,128)} all-reduce(%input), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %own = bf16[16,8]{1,0:T(8,128)} dynamic-slice(%sum, %place, %zero), dynamic_slice_sizes={16,8}
}
"""


def test_a_tpu_loop_has_a_constant_bound_and_duplicate_collectives_count_once():
    assert collectives(TPU) == ({"all-gather": Traffic(40, 40 * 32, 4), "reduce-scatter": Traffic(40, 40 * 32, 4)}, 0)
    assert collectives(TPU.replace("constant(40)", "parameter(1)"))[1] == 1


def test_a_tpu_all_reduce_followed_by_a_slice_counts_as_a_reduce_scatter():
    assert collectives(SCATTER) == ({"reduce-scatter": Traffic(1, 1024, 4)}, 0)


@pytest.mark.parametrize(("name", "shape"), [("v5e-16", (4, 4, 1)), ("v5e-8", (2, 4, 1)), ("v5p-64", (2, 4, 4)),
                                             ("v4-8", (1, 2, 2)), ("v6e-1", (1, 1, 1))])
def test_tpu_slices_are_as_square_as_possible(name, shape):
    assert tpu_shape(target_named(name)) == shape


@pytest.mark.parametrize(("name", "rings"), [("v5e-64", False), ("v6e-256", True), ("v5p-64", False),
                                             ("v5p-128", True)])
def test_only_whole_pods_and_slices_of_cubes_have_rings(name, rings):
    target = target_named(name)
    assert tpu_rings(tpu_shape(target), target.kind.cores == 1) == ((rings, rings, False) if target.kind.cores == 1
                                                                    else (rings,) * 3)


def test_a_slice_size_that_is_not_a_power_of_two_is_rejected():
    with pytest.raises(UserError, match="no slice of v5e has 12 chips"):
        tpu_shape(target_named("v5e-12"))


@pytest.mark.slow
def test_a_recipe_is_planned_on_gpus_that_this_machine_lacks(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    arguments = ["plan", "--config", "configs/clm.yaml", "--model.config", MODEL, "--engine", "jax",
                 "--on", "8xRTX3090", "--trainer.strategy", "fsdp", "--trainer.precision", "bf16-mixed",
                 "--trainer.default_root_dir", str(tmp_path), "--data.batch_size", "2"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in printed.splitlines()}
    assert all("simulated" in lines[kind] and "8 devices" in lines[kind] for kind in ("all-reduce", "all-gather"))
    assert "fits" in lines["memory of each device"] and "compiler keeps 16-bit products" in printed
    assert "tokens per second, 4,096 a step" in printed and "300 steps" in printed
    assert "of 11.18 GiB for a step" in printed and "XLA uses 50% of a GPU's memory" in printed


@pytest.mark.slow
def test_steps_use_the_planned_memory():
    """On this CPU, the peak memory of a training process is within a tenth of the recipe's plan."""
    recipes = [json.dumps(["--config", f"configs/{name}.yaml", "--data.source", rows, "--data.batch_size", "4"])
               for name, rows in FEW_ROWS.items()]
    [output] = together(recipes, program=compare)
    pairs = [[int(size) for size in line.split()[1:]] for line in output.splitlines() if line.startswith("bytes")]
    assert len(pairs) == len(FEW_ROWS), output
    for planned, measured in pairs:
        assert planned == pytest.approx(measured, rel=0.1)
