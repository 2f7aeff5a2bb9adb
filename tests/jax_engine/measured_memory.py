"""Prints, for each recipe that is named, what a plan says that a step takes and what it then takes, in bytes.

A program of its own: the peak is that of the process, and freed memory must go back to the system.
"""

import ctypes
import gc
import json
import sys

import jax

ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: every larger array is mapped, and unmapped when freed
ctypes.CDLL(None).mallopt(-1, 1 << 16)  # M_TRIM_THRESHOLD

from jax_engine.distributed.devices import spread  # noqa: E402
from jax_engine.distributed.steps import Clipping, Steps  # noqa: E402
from jax_engine.optim import build, step_scalars  # noqa: E402
from jax_engine.planning import outlined_batch  # noqa: E402
from lmmods.commands.engine_cli import types_of  # noqa: E402
from lmmods.commands.planner import Planning  # noqa: E402
from lmmods.core.hardware import target_named  # noqa: E402


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024


class Measured(Planning):
    def plan(self, model, datamodule, on):
        from jax_engine.planning import Planner

        planner = Planner(self.trainer, model, datamodule, target_named(on))
        variant = planner.recipe()
        self.planned = planner.plan(variant)
        parallel = spread("auto", jax.devices()[:1])
        trainable, frozen = model.build(planner.precision, datamodule, 0)
        optimizer = build(model.optimizer, model.network.decays(trainable))
        steps = Steps(parallel, model.batch_loss, optimizer, Clipping(self.trainer.gradient_clip_val), None)
        host = {name: jax.numpy.ones(x.shape, x.dtype) for name, x in outlined_batch(
            planner.example, 1, variant.rows, datamodule.max_length).items()}
        batch = parallel.put_batch(jax.device_get(host))
        state, frozen = steps.new_state(parallel.put_state(trainable)), parallel.put_state(frozen)
        scalars = parallel.put_scalars(step_scalars(model.optimizer, 0, 10))
        del trainable, host
        for _ in range(2):
            if variant.accumulated == 1:
                state, figures = steps.full_step(state, frozen, batch, scalars)
            else:
                sums = steps.accumulate(state, frozen, steps.new_accumulation(state), batch)
                state, figures = steps.update(state, steps.accumulate(state, frozen, sums, batch), scalars)
                del sums
            jax.block_until_ready((state, figures))
            gc.collect()
            resting = status("VmRSS")
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        held = sum(leaf.nbytes for leaf in jax.tree.leaves((state, frozen, batch)))
        if variant.accumulated == 1:
            state, figures = steps.full_step(state, frozen, batch, scalars)
        else:
            sums = steps.accumulate(state, frozen, steps.new_accumulation(state), batch)
            state, figures = steps.update(state, steps.accumulate(state, frozen, sums, batch), scalars)
        jax.block_until_ready((state, figures))
        self.taken = held + status("VmHWM") - resting


for arguments in json.loads(sys.argv[1]):
    cli = Measured(types_of("jax"), "jax", arguments)
    print(json.dumps([cli.planned.total, cli.taken]), flush=True)
