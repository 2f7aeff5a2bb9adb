"""Prints, for each recipe that is named, what a plan says that a step takes and what it then takes, in bytes.

A program of its own: the peak is that of the process, and freed memory must go back to the system.
"""

import ctypes
import gc
import json
import sys

import torch

ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: every larger array is mapped, and unmapped when freed
ctypes.CDLL(None).mallopt(-1, 1 << 16)  # M_TRIM_THRESHOLD

from lmmods.commands.engine_cli import types_of  # noqa: E402
from lmmods.commands.planner import Planning  # noqa: E402
from lmmods.core.hardware import target_named  # noqa: E402
from lmmods.torch_engine.bare_step import full_batch, stand_in, take_step  # noqa: E402
from lmmods.torch_engine.nn.optim import build_optimizer  # noqa: E402
from lmmods.torch_engine.planning import Planner  # noqa: E402


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024


class Measured(Planning):
    def plan(self, model, datamodule, on):
        planner = Planner(self.trainer, model, datamodule, target_named(on), *self._asked)
        variant = planner.recipe()
        self.planned = planner.plan(variant)
        model.trainer = stand_in(datamodule, planner.precision, variant.accumulated)
        model.configure_model()
        optimizer = build_optimizer(model.named_parameters(), model.optimizer)
        batches = [full_batch(planner.example, variant.rows, datamodule.max_length)] * variant.accumulated
        for _ in range(2):
            take_step(model, optimizer, batches, (self.trainer.gradient_clip_val, None))
        gc.collect()
        resting = status("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        held = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
        held += [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
        for param in model.parameters():
            packed = getattr(param, "quant_state", None)
            held += [] if packed is None else [packed.absmax, packed.state2.absmax]
        held += batches[0].values()
        take_step(model, optimizer, batches, (self.trainer.gradient_clip_val, None))
        sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
        self.taken = sum(sizes.values()) + status("VmHWM") - resting


for arguments in json.loads(sys.argv[1]):
    cli = Measured(types_of("torch"), "torch", arguments)
    print(json.dumps([cli.planned.total, cli.taken]), flush=True)
