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


def test_collectives_count_as_often_as_their_loop_runs():
    """Each layer's matrix is gathered forward and backward, and its gradient added up."""
    mesh = jax.make_mesh((1, 8), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])

    def loss(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].sum()

    def outline(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    program = jax.jit(jax.grad(loss)).lower(outline((LAYERS, WIDTH, WIDTH), None, None, "fsdp"),
                                            outline((16, WIDTH), "fsdp")).compile()
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


def test_programs_of_tpus_tell_passes_by_a_constant_and_one_collective_several_times():
    assert collectives(TPU) == ({"all-gather": Traffic(40, 40 * 32, 4), "reduce-scatter": Traffic(40, 40 * 32, 4)}, 0)
    assert collectives(TPU.replace("constant(40)", "parameter(1)"))[1] == 1


def test_programs_of_tpus_spell_a_reduce_scatter_as_a_sum_of_which_each_keeps_a_part():
    assert collectives(SCATTER) == ({"reduce-scatter": Traffic(1, 1024, 4)}, 0)


@pytest.mark.parametrize(("name", "shape"), [("v5e-16", (4, 4, 1)), ("v5e-8", (2, 4, 1)), ("v5p-64", (2, 4, 4)),
                                             ("v4-8", (1, 2, 2)), ("v6e-1", (1, 1, 1))])
def test_slices_are_as_even_as_they_go(name, shape):
    assert tpu_shape(target_named(name)) == shape


@pytest.mark.parametrize(("name", "rings"), [("v5e-64", False), ("v6e-256", True), ("v5p-64", False),
                                             ("v5p-128", True)])
def test_whole_pods_and_slices_of_cubes_have_rings(name, rings):
    on = target_named(name)
    assert tpu_rings(tpu_shape(on), on.kind.cores == 1) == ((rings, rings, False) if on.kind.cores == 1
                                                            else (rings,) * 3)


def test_slices_are_powers_of_two():
    with pytest.raises(UserError, match="no slice of v5e has 12 chips"):
        tpu_shape(target_named("v5e-12"))


@pytest.mark.slow
def test_a_recipe_is_planned_on_gpus_that_are_not_here(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    arguments = ["plan", "--config", "configs/clm.yaml", "--model.config", MODEL, "--engine", "jax",
                 "--on", "8xRTX3090", "--trainer.strategy", "fsdp", "--trainer.precision", "bf16-mixed",
                 "--trainer.default_root_dir", str(tmp_path), "--data.batch_size", "2"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    found = {line.split("  ")[0]: line for line in printed.splitlines()}
    assert all("simulated" in found[kind] and "8 devices" in found[kind] for kind in ("all-reduce", "all-gather"))
    assert "fits" in found["memory of each device"] and "compiler keeps 16-bit products" in printed
    assert "tokens per second, 4,096 a step" in printed and "300 steps" in printed
    assert "of 11.18 GiB for a step" in printed and "XLA uses 50% of a GPU's memory" in printed


@pytest.mark.slow
def test_steps_take_the_memory_that_is_planned():
    """Of this machine's processor, within a tenth: the peak of a process that trains against the plan of the recipe."""
    [said] = together([json.dumps(["--config", f"configs/{name}.yaml", "--data.source", rows, "--data.batch_size", "4"])
                       for name, rows in FEW_ROWS.items()], program=compare)
    pairs = [[int(size) for size in line.split()[1:]] for line in said.splitlines() if line.startswith("bytes")]
    assert len(pairs) == len(FEW_ROWS), said
    for planned, taken in pairs:
        assert planned == pytest.approx(taken, rel=0.1)
