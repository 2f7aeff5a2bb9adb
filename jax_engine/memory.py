"""Memory of a training step, from its compiled programs."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from jax_engine.distributed.pool import largest_gap
from jax_engine.distributed.steps import Batch, Steps
from jax_engine.distributed.tree import Tree
from lmmods.core.errors import is_out_of_memory
from lmmods.core.hardware import Target
from lmmods.core.labels import has_tokens
from lmmods.core.memory import StepMemory


def compile_step(lowered: dict[str, jax.stages.Lowered], argument_bytes: dict[str, int], available: float,
                 trusts_compiler: bool = False, gap: float = math.inf
                 ) -> tuple[StepMemory, dict[str, jax.stages.Compiled]]:
    """Compile the programs of a step; return its memory and the programs, which are empty if they do not fit.

    Args:
        lowered: Programs by name, from `Steps.lower`.
        argument_bytes: Bytes of the programs' arguments on each device, by part.
        available: As in `StepMemory`; so are `trusts_compiler` and `gap`.
    """
    programs, refusal = {}, None
    try:
        programs = {name: program.compile() for name, program in lowered.items()}
    except (RuntimeError, ValueError) as error:
        if not is_out_of_memory(error):
            raise
        refusal = next((line.strip() for line in str(error).splitlines() if "memory" in line.lower()), "out of memory")
    analyses = [program.memory_analysis() for program in programs.values()]
    # The programs of a step run one after another. Results in donated buffers (aliases) take no additional memory.
    temporaries = max((analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
                       for analysis in analyses), default=0)
    memory = StepMemory({**argument_bytes, "temporaries": temporaries}, available, "compiled by XLA", refusal,
                        trusts_compiler, temporaries, gap)
    return memory, programs


def step_memory(steps: Steps, state: Tree, frozen: Tree, batch: Batch, scalars: Any, max_length: int, accumulates: bool,
                on: Target) -> StepMemory:
    """Return the memory of a run's step, for micro-batches of maximum length.

    Args:
        state: State on the devices, like `frozen`, `batch` (a micro-batch) and `scalars`.
        accumulates: A step has several micro-batches.
        on: The devices that are present.
    """
    rows = full_length(batch, max_length)
    argument_bytes = {"parameters": _device_bytes(state["trainable"]) + _device_bytes(frozen),
                      "optimiser state": _device_bytes(state["optimizer"]),
                      "rows": sum(_device_bytes(batch[name]) * row.size // batch[name].size
                                  for name, row in rows.items())}
    accumulation = None
    if accumulates or steps.surveys:
        # Real arrays of zeros: their shardings are those of training.
        accumulation = steps.new_accumulation(state)
        argument_bytes["summed gradients"] = _device_bytes(accumulation["gradients"])
    lowered = steps.lower(state, frozen, rows, scalars, accumulation)
    # In the order in which a run places them.
    arrays = (state["trainable"], frozen, state["optimizer"], accumulation or {}, batch)
    gap = largest_gap(on, on.memory, (leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(arrays)))
    memory, _ = compile_step(lowered, argument_bytes, on.memory, on.platform == "tpu", gap)
    return memory


def full_length(batch: Batch, max_length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a micro-batch [ranks, B, ..., T] at the maximum length."""
    axis = batch["input_ids"].ndim - 1

    def outline(name: str, x: jax.Array) -> jax.ShapeDtypeStruct:
        is_long = has_tokens(name, x.ndim, x.dtype.kind == "f", axis)
        shape = (*x.shape[:axis], max_length, *x.shape[axis + 1:]) if is_long else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding if isinstance(x.sharding, NamedSharding)
                                    else None)

    return {name: outline(name, x) for name, x in batch.items()}


def _device_bytes(tree: Tree) -> int:
    """Return the bytes of a tree on the first device of this process."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
