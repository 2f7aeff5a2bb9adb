"""What a training step of a recipe needs on devices that need not be here: its own programs, lowered and compiled."""

import copy
import os
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jax_engine.distributed import devices as machines
from jax_engine.distributed.collectives import collectives
from jax_engine.distributed.interface import Parallel
from jax_engine.distributed.steps import Clipping, Steps
from jax_engine.distributed.target import made_for
from jax_engine.distributed.topologies import devices_of, plugin
from jax_engine.distributed.tree import Tree, flatten, merge, new_state
from jax_engine.optim import build, step_scalars
from jax_engine.tasks.base import Task
from lmmods.core.experts import mixture_of
from lmmods.core.hardware import Target
from lmmods.core.model_sizes import score_flops
from lmmods.core.out_of_memory import is_out_of_memory
from lmmods.core.plan import StepPlan, Traffic, Variant
from lmmods.runs.schedule import RunLength

PREALLOCATED = 0.75  # of a GPU's memory: what XLA takes unless the variable says otherwise
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_ATTENTION = re.compile(r'custom_call_target="__(cudnn\$fmha\w*)"|%(splash_mha_(?:fwd|dq|dkv))\S* = .* custom-call\(')


class Planner:
    """Plans of one recipe on one target.

    Args:
        trainer: Of the recipe.
        on: The target.
    """

    may_shard = True  # whatever the recipe

    def __init__(self, trainer: Any, task: Task, data: Any, on: Target):
        self.trainer, self.task, self.data = trainer, task, data
        self.devices, simulated = devices_of(on)
        self.on = replace(on, is_simulated=simulated)
        trainer.state.fn = SimpleNamespace(value="fit")
        trainer.parallel = machines.spread(trainer.strategy, self.devices)  # rows of a step are those of the target
        data.trainer = trainer
        data.prepare_data()
        data.setup("fit")
        self._loader = data.train_dataloader()
        self.example = next(iter(self._loader))
        with made_for(self.on):
            self.precision = machines.choose_precision()[0] if trainer.precision == "auto" else trainer.precision

    @property
    def missing(self) -> str | None:
        """The package without which the target is only simulated."""
        return plugin(self.on) if self.on.is_simulated else None

    def recipe(self) -> Variant:
        """The recipe as it is."""
        task, trainer = self.task, self.trainer
        return Variant(self.data.batch_size, trainer.accumulate_grad_batches, task.gradient_checkpointing,
                       trainer.strategy, task.quantize, task.lora)

    @property
    def length(self) -> RunLength:
        """Of the run."""
        trainer = self.trainer
        return RunLength(len(self._loader) * self.data.batch_size, trainer.limits["train"], trainer.max_steps,
                         trainer.max_epochs)

    def plan(self, variant: Variant) -> StepPlan:
        """What a step needs; compiles it."""
        task = copy.copy(self.task)
        task.gradient_checkpointing, task.quantize, task.lora = variant.checkpointing, variant.quantize, variant.lora
        task.__post_init__()
        with made_for(self.on):
            return self._plan(task, variant)

    def _plan(self, task: Task, variant: Variant) -> StepPlan:
        parallel = machines.spread(variant.strategy, self.devices)
        trainable, frozen = task.build(self.precision, self.data, 0, abstract=True)
        optimizer = build(task.optimizer, task.network.decays(trainable))
        clipping = Clipping(self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm or "norm")
        steps = Steps(parallel, task.batch_loss, optimizer, clipping, None, task.metric_names, task.survey,
                      task.statistic_names)
        rows = outlined_batch(self.example, parallel.data_parallel_size, variant.rows, self.data.max_length)
        accumulates = variant.accumulated > 1 or task.survey is not None
        lowered = steps.lowered(trainable, frozen, rows, step_scalars(task.optimizer, 0, 1), accumulates)
        state = jax.eval_shape(lambda leaves: new_state(leaves, optimizer.init), trainable)
        memory = {"parameters": _held(parallel, trainable, "state") + _held(parallel, frozen, "state"),
                  "optimiser state": _held(parallel, state["optimizer"], "state"),
                  "rows": _held(parallel, rows, "batch")}
        gradients = sum(4 * part.size for part in jax.tree.leaves(_parts(parallel, trainable, "state")))
        if accumulates:
            memory["summed gradients"] = gradients
        programs, refusal = {}, None
        try:
            programs = {name: program.compile() for name, program in lowered.items()}
        except (RuntimeError, ValueError) as error:
            if not is_out_of_memory(error):
                raise
            refusal = next((line.strip() for line in str(error).splitlines() if "memory" in line.lower()), "no room")
        found = [program.memory_analysis() for program in programs.values()]
        memory["temporaries"] = max((part.temp_size_in_bytes + part.output_size_in_bytes - part.alias_size_in_bytes
                                     for part in found), default=0)
        traffic, notes = self._traffic(programs, variant.accumulated)
        tokens = rows["input_ids"].size * variant.accumulated
        parts = {} if accumulates else {"gradients": gradients}
        return StepPlan(
            self.on, "simulated" if self.on.is_simulated else "compiled", memory, parts, self._room(), refusal,
            traffic, self._flops(task, trainable, frozen, rows, variant.accumulated), task.network.build.dtype.name,
            tokens, parallel.data_parallel_size, notes, kernels=_kernels(programs))

    def _room(self) -> float:
        return self.on.room(float(os.environ.get(FRACTION, PREALLOCATED)))

    def _flops(self, task: Task, trainable: Tree, frozen: Tree, rows: dict[str, Any], accumulated: int) -> float:
        """Arithmetic of a step on each device, with what is computed again."""
        arch, tokens = task.network.arch, rows["input_ids"]
        trained, forward_alone = task.passes()
        step, forward = task.flops_per_token(trainable, frozen), task.flops_per_token({}, merge(trainable, frozen)) / 2
        again = task.network.remat == "full"
        if again:
            mixture = mixture_of(task.network.config)
            step += 2 * sum(leaf.size * (mixture.share if "experts" in path else 1)
                            for tree in (trainable, frozen) for path, leaf in flatten(tree).items()
                            if path[0] == "layers")
        total = (trained * step + forward_alone * forward) * tokens.size
        if "segment_ids" not in rows:
            scores = score_flops(tokens.shape[-1], arch.windows, arch.num_heads * arch.head_dim, arch.causal)
            total += (trained * (3 + again) + forward_alone) * scores * (tokens.size // tokens.shape[-1])
        return total * accumulated / self.on.num_devices

    def _traffic(self, programs: dict[str, Any], accumulated: int) -> tuple[dict[str, Traffic], list[str]]:
        total: dict[str, Traffic] = {}
        unknown = 0
        for name, program in programs.items():
            found, loops = collectives(program.as_text())
            unknown += loops
            times = accumulated if name == "accumulate" else 1
            for kind, one in found.items():
                total[kind] = total.get(kind, Traffic(0, 0, 1)).plus(one, times)
        notes = [f"rows are as long as they may be: {self.data.max_length} tokens"]
        if "segment_ids" in self.example:
            notes.append("the scores of attention, which depend on how long packed documents are, are not in the "
                         "arithmetic")
        if self.on.platform == "gpu":
            notes.append(f"XLA takes {self._room() / self.on.memory:.0%} of a GPU's memory ({FRACTION})")
        if unknown:
            notes.append(f"loops whose passes the program does not tell count once in the collectives: {unknown}")
        if self.on.platform == "tpu" and not self.on.is_simulated:
            notes.append("whether it fits is the word of the TPU's compiler, whose figures count more than it needs")
        if self.on.is_simulated:
            notes.append("simulated on this machine's processor, whose compiler keeps products of 16 bits in 32")
        return total, notes


def outlined_batch(example: dict[str, Any], ranks: int, rows: int, max_length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of all ranks, as long as it may be; `example` is one of the loader."""
    axis = example["input_ids"].ndim - 1
    outlined = {}
    for name, x in example.items():
        x = np.asarray(x)
        length = (max_length,) if x.ndim > axis else ()
        shape = (ranks, rows, *x.shape[1:axis], *length, *x.shape[axis + 1:])
        outlined[name] = jax.ShapeDtypeStruct(shape, np.float32 if x.dtype.kind == "f" else np.int32)
    return outlined


def _parts(parallel: Parallel, tree: Tree, kind: str) -> Tree:
    """Shape and dtype of what a device holds of each array."""
    def part(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = x.sharding.shard_shape(x.shape) if x.sharding is not None else (1, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(part, parallel.outline(tree, kind))


def _held(parallel: Parallel, tree: Tree, kind: str) -> int:
    """Bytes that a device holds of a tree."""
    return sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(_parts(parallel, tree, kind)))


def _kernels(programs: dict[str, Any]) -> dict[str, int]:
    """Fused attention: calls that stand in the programs, by name."""
    found = Counter("".join(names) for program in programs.values() for names in _ATTENTION.findall(program.as_text()))
    return {name.replace("cudnn$", "cuDNN "): count for name, count in sorted(found.items())}
