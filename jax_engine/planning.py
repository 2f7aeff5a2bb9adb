"""Planning: compile a recipe's training step, also for absent devices, and report its memory, FLOPs and traffic."""

import copy
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jax_engine.distributed import devices as machines
from jax_engine.distributed.interface import Parallel
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.pool import FRACTIONS, Pool, largest_gap
from jax_engine.distributed.steps import Clipping, Steps
from jax_engine.distributed.tree import AT, Tree, flatten, merge, new_state
from jax_engine.memory import compile_step
from jax_engine.optim import build, step_scalars
from jax_engine.tasks.base import Task
from jax_engine.tasks.reference import without_copies
from jax_engine.tasks.sampler import answers_at_once
from jax_engine.tasks.teacher import without_teacher
from lmmods.core.errors import UserError
from lmmods.core.experts import mixture_of
from lmmods.core.hardware import Target
from lmmods.core.labels import has_tokens
from lmmods.core.memory import score_flops
from lmmods.core.plan import SamplingPlan, StepPlan, Traffic, Variant
from lmmods.data.base import DataModule
from lmmods.runs.schedule import RunLength

_ATTENTION = re.compile(r'custom_call_target="__(cudnn\$fmha\w*)"|%(splash_mha_(?:fwd|dq|dkv))\S* = .* custom-call\(')


class Planner:
    """Planner of one recipe on one target.

    Args:
        trainer: The recipe's trainer.
        on: The target.
    """

    may_shard = True  # this engine can shard any recipe

    def __init__(self, trainer: Any, task: Task, data: DataModule, on: Target):
        self.trainer, self.task, self.data = trainer, task, data
        self.devices, simulated = select_devices(on)
        self.on = replace(on, is_simulated=simulated)
        trainer.state.fn = SimpleNamespace(value="fit")
        # The target's ranks determine the rows of a step.
        trainer.parallel = machines.spread(trainer.strategy, self.devices, self.on)
        data.trainer = trainer
        data.prepare_data()
        data.setup("fit")
        task.link(data)
        self._loader = data.train_batches()
        self.example = task.complete({name: np.asarray(x) for name, x in next(iter(self._loader)).items()})
        self.precision = machines.choose_precision(self.on)[0] if trainer.precision == "auto" else trainer.precision

    @property
    def missing(self) -> str | None:
        """Missing package that would compile for the target; None if the target is not simulated."""
        return plugin(self.on) if self.on.is_simulated else None

    def recipe(self) -> Variant:
        """Return the recipe unchanged, as a variant."""
        task, trainer = self.task, self.trainer
        return Variant(self.data.batch_size, trainer.accumulate_grad_batches, task.gradient_checkpointing,
                       trainer.strategy, task.quantize, task.lora)

    @property
    def length(self) -> RunLength:
        """Length of the run."""
        trainer = self.trainer
        return RunLength(len(self._loader) * self.data.batch_size, trainer.limits["train"], trainer.max_steps,
                         trainer.max_epochs)

    def plan(self, variant: Variant) -> StepPlan:
        """Compile a step of a variant; return its memory, FLOPs and traffic."""
        # A copy, since several variants are planned. `__post_init__` checks the changed fields.
        task = copy.copy(self.task)
        task.gradient_checkpointing, task.quantize, task.lora = variant.checkpointing, variant.quantize, variant.lora
        task.__post_init__()
        parallel = machines.spread(variant.strategy, self.devices, self.on)
        trainable, frozen = task.build(self.precision, self.data, 0, abstract=True, on=self.on)
        optimizer = build(task.optimizer, task.network.decays(trainable), task.network.depths(trainable))
        clipping = Clipping(self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm or "norm")
        steps = Steps(parallel, task.batch_loss, optimizer, clipping, None, task.metric_names, task.survey,
                      task.statistic_names, task.chunk_tokens(parallel.num_devices))
        rows = outline_batch(self.example, parallel.data_parallel_size, variant.rows, self.data.max_length)
        accumulates = variant.accumulated > 1 or task.survey is not None
        scalars = step_scalars(task.optimizer, 0, 1, task.network.num_named_layers)
        lowered = steps.lower_shapes(trainable, frozen, rows, scalars, accumulates)
        state = jax.eval_shape(lambda leaves: new_state(leaves, optimizer.init), trainable)
        memory = {"parameters": _device_bytes(parallel, trainable, "state") + _device_bytes(parallel, frozen, "state"),
                  "optimiser state": _device_bytes(parallel, state["optimizer"], "state"),
                  "rows": _device_bytes(parallel, rows, "batch")}
        # float32, of this device's shards.
        gradients = sum(4 * shard.size for shard in jax.tree.leaves(_shards(parallel, trainable, "state")))
        if accumulates:
            memory["summed gradients"] = gradients
        # In the order in which a run places them.
        shards = [_shards(parallel, tree, "state") for tree in (trainable, frozen, state["optimizer"])]
        sizes = [shard.size * shard.dtype.itemsize for shard in jax.tree.leaves(shards)]
        gap = largest_gap(self.on, self._usable_memory(), [*sizes, memory.get("summed gradients", 0), memory["rows"]])
        compiled, programs = compile_step(lowered, memory, self._usable_memory(), gap=gap)
        traffic, notes = self._traffic(programs, variant.accumulated)
        tokens = rows["input_ids"].size * variant.accumulated
        # Without accumulation, gradients exist only within the step, so the compiler's temporaries include them.
        parts = {} if accumulates else {"gradients": gradients}
        return StepPlan(
            self.on, "simulated" if self.on.is_simulated else "compiled", compiled.parts, parts, compiled.available,
            compiled.refusal, traffic, self._flops(task, trainable, frozen, rows, variant.accumulated),
            task.network.build.dtype.name, tokens, parallel.data_parallel_size, notes, kernels=_kernels(programs),
            sampling=self._sampling(task, parallel, merge(trainable, without_copies(frozen)), variant),
            gap=compiled.gap)

    def _sampling(self, task: Task, parallel: Parallel, params: Tree, variant: Variant) -> SamplingPlan | None:
        """Return how a process samples answers: on one of its devices, or on all devices of a one-process mesh.

        Assumes one process per group of linked devices.
        """
        rows = variant.rows * variant.accumulated * parallel.data_parallel_size
        load, config = task.sampling_load(rows, self.data.eval_batch_size), task.network.config
        if load is None:
            return None
        processes = -(-self.on.num_devices // self.on.kind.per_node) if self.on.kind else 1
        lookup_path = None if config.tie_word_embeddings else ("embed", "tokens", "weight")
        weights = [(".".join(path), sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(leaf)))
                   for path, leaf in flatten(params).items() if path != lookup_path]
        length = self.data.max_length
        at_once = answers_at_once(task.network, length, self.on.memory)
        return SamplingPlan.of(config, -(-load.answers // processes), at_once, load.steps,
                               (length, load.new_tokens), task.network.build.dtype.itemsize, weights,
                               self.on.num_devices if isinstance(parallel, ShardedMesh) and processes == 1 else 1)

    def _usable_memory(self) -> float:
        return self.on.usable_bytes(Pool.from_environment().fraction)

    def _flops(self, task: Task, trainable: Tree, frozen: Tree, rows: dict[str, Any], accumulated: int) -> float:
        """Return the FLOPs of a step per device, including recomputation."""
        arch, tokens = task.network.arch, rows["input_ids"]
        trained, forward_alone = task.passes()
        # Without trained parameters, FLOPs are counted as 4 per weight: half of them are the forward pass.
        own_params = merge(trainable, without_teacher(frozen))
        step, forward = task.flops_per_token(trainable, frozen), task.flops_per_token({}, own_params) / 2
        is_recomputed = task.network.remat in ("full", "offload")
        # Full remat repeats the layers' forward pass: 2 FLOPs per weight.
        if is_recomputed:
            mixture = mixture_of(task.network.config)
            step += 2 * sum(leaf.size * (mixture.fraction if "experts" in path else 1)
                            for tree in (trainable, frozen) for path, leaf in flatten(tree).items()
                            if path[0].partition(AT)[0] == "layers")
        total = (trained * step + forward_alone * forward) * tokens.size
        mixing = 0 if arch.linear_heads is None else arch.linear_heads.flops_per_token * tokens.size
        if "segment_ids" not in rows:
            attentions = [arch.kinds[stored].attention for stored in arch.passes]
            scores = sum(score_flops(tokens.shape[-1], [window], arch.num_heads * arch.head_sizes(name)[1], arch.causal)
                         for window, name in zip(arch.windows, attentions, strict=True) if name != "linear_attn")
            mixing += scores * (tokens.size // tokens.shape[-1])
        # One product forward, two backward, and one more forward with remat.
        total += (trained * (3 + is_recomputed) + forward_alone) * mixing
        return total * accumulated / self.on.num_devices

    def _traffic(self, programs: dict[str, Any], accumulated: int) -> tuple[dict[str, Traffic], list[str]]:
        total: dict[str, Traffic] = {}
        unknown = 0
        for name, program in programs.items():
            by_kind, loops = collectives(program.as_text())
            unknown += loops
            # `accumulate` runs once per micro-batch, `update` and `full_step` once per step.
            times = accumulated if name == "accumulate" else 1
            for kind, traffic in by_kind.items():
                total[kind] = total.get(kind, Traffic(0, 0, 1)).plus(traffic, times)
        notes = [f"assumes rows of the maximum length, {self.data.max_length} tokens"]
        if "segment_ids" in self.example:
            notes.append("FLOPs exclude attention scores, which depend on the lengths of packed documents")
        if self.on.platform == "gpu":
            notes.append(f"XLA uses {self._usable_memory() / self.on.memory:.0%} of a GPU's memory ({FRACTIONS[0]})")
        if unknown:
            notes.append(f"collectives in {unknown} loops of unknown trip count are counted once")
        if self.on.platform == "tpu" and not self.on.is_simulated:
            notes.append("the TPU compiler decides whether it fits; its figures are higher than the memory used")
        if self.on.is_simulated:
            notes.append("simulated on this machine's CPU, whose compiler keeps 16-bit products in 32 bits")
        return total, notes


def outline_batch(example: dict[str, Any], ranks: int, rows: int, max_length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return an abstract batch of all ranks at the maximum length, from one of the loader's batches."""
    axis = example["input_ids"].ndim - 1
    outlines = {}
    for name, x in example.items():
        x = np.asarray(x)
        is_long = has_tokens(name, x.ndim, x.dtype.kind == "f", axis)
        shape = (ranks, rows, *x.shape[1:axis], *((max_length,) if is_long else x.shape[axis:axis + 1]),
                 *x.shape[axis + 1:])
        outlines[name] = jax.ShapeDtypeStruct(shape, np.float32 if x.dtype.kind == "f" else np.int32)
    return outlines


def _shards(parallel: Parallel, tree: Tree, kind: str) -> Tree:
    """Return the shape and dtype of each array's shard on a device."""
    def shard(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # On a mesh the shard; with replicas one element of the leading device axis.
        shape = x.sharding.shard_shape(x.shape) if x.sharding is not None else (1, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(shard, parallel.outline(tree, kind))


def _device_bytes(parallel: Parallel, tree: Tree, kind: str) -> int:
    """Return the bytes of a tree's shards on a device."""
    return sum(shard.size * shard.dtype.itemsize for shard in jax.tree.leaves(_shards(parallel, tree, kind)))


def _kernels(programs: dict[str, Any]) -> dict[str, int]:
    """Count the calls of fused attention kernels in the programs, by name."""
    counts = Counter("".join(names) for program in programs.values() for names in _ATTENTION.findall(program.as_text()))
    return {name.replace("cudnn$", "cuDNN "): count for name, count in sorted(counts.items())}


# ---------------------------------------------------------------------------------------------------------------------
# Collectives of a compiled program, from its HLO: executions per call, and bytes.

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "s4": 4, "u4": 4}
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:body|calls|to_apply|async_computation)=%?([\w.\-]+)")


def collectives(hlo: str) -> tuple[dict[str, Traffic], int]:
    """Return the traffic of one call by kind of collective, and the number of loops with an unknown trip count.

    Loop bodies count once per iteration, or once if the trip count is unknown.

    Args:
        hlo: Text of the compiled module.
    """
    computations = _computations(hlo)
    # TPU programs mention a collective in several fusions, which start it and wait for it. Its channel identifies it.
    by_channel: dict[str, tuple[str, int, int, int]] = {}
    unknown = set()

    def walk(name: str, times: int, callers: tuple[str, ...], in_fusion: bool = False) -> None:
        if name in callers:
            return
        # Instructions are one per line: `%name = f32[8,4]{1,0} all-gather(...), channel_id=1, replica_groups=...`.
        for line in computations.get(name, ()):
            if (match := _INSTRUCTION.match(line)) is None:
                continue
            # An asynchronous collective is a pair of -start and -done: only -start counts.
            kind, passes = match[2].removesuffix("-start"), times
            if kind in KINDS:
                group, channel = _group_size(line), re.search(r"channel_id=(\d+)", line)
                size = _whole_bytes(kind, match[1], match[2], group)
                # In TPU programs a reduce-scatter is a fusion of all-reduce and slice, in a computation of this name.
                mention = ("reduce-scatter" if "all-reduce-scatter" in name else kind, times, size, group)
                # Keep the most frequent mention.
                key = channel[1] if channel and in_fusion else line
                by_channel[key] = max(by_channel.get(key, mention), mention, key=lambda mention: mention[1])
            if kind == "while":
                trip_count = _trip_count(line, computations)
                passes = times * (trip_count or 1)
                if trip_count is None:
                    unknown.add(line)
            # Bodies of loops, fusions and conditionals are separate computations.
            branches = [part.strip().lstrip("%") for part in ",".join(
                re.findall(r"branch_computations=\{([^}]*)\}", line)).split(",") if part]
            for called in (*_CALLED.findall(line), *branches):
                walk(called, passes, (*callers, name), in_fusion or kind == "fusion")

    walk("", 1, ())
    total: dict[str, Traffic] = {}
    for kind, times, size, group in by_channel.values():
        if group > 1:
            total[kind] = total.get(kind, Traffic(0, 0, group)).plus(Traffic(times, times * size, group))
    return total, len(unknown)


def _computations(hlo: str) -> dict[str, list[str]]:
    """Return the lines of each computation by name; the entry computation's name is empty."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        # A computation starts at the margin and ends its first line with a brace.
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            name = "" if line.startswith("ENTRY") else line.split()[0].lstrip("%").split("(")[0]
            lines = computations[name] = []
        else:
            lines.append(line)
    return computations


def _bytes(shapes: str) -> list[int]:
    return [math.prod(int(size) for size in sizes.split(",") if size) * _BITS.get(kind, _width(kind)) // 8
            for kind, sizes in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shapes)]


def _width(kind: str) -> int:
    # The first number in the other types' names: s32, u64, f8e4m3fn.
    digits = re.search(r"\d+", kind)
    return int(digits[0]) if digits else 0


def _whole_bytes(kind: str, shapes: str, operation: str, group: int) -> int:
    """Return the bytes of a collective's unsharded array, from the shapes of its results."""
    sizes = _bytes(shapes)
    if operation.endswith("-start") and kind in ("all-gather", "reduce-scatter"):
        sizes = sizes[len(sizes) // 2:]  # results follow the operands
    elif operation.endswith("-start") and kind == "collective-permute":
        sizes = sizes[:1]
    # A reduce-scatter returns one shard, an all-gather the whole array.
    return sum(sizes) * (group if kind == "reduce-scatter" else 1)


def _group_size(line: str) -> int:
    """Return the number of devices in a collective's group."""
    # Three notations: lists, {{0,1},{2,3}}; axes of a mesh; and [number of groups, devices per group]<=[...].
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return listed[1].count(",") + 1
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2]))
    # A collective-permute has pairs of devices instead of groups.
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    return int(counted[2]) if counted else 2


def _trip_count(line: str, computations: dict[str, list[str]]) -> int | None:
    """Return a loop's trip count, from the compiler's annotation or the constant upper bound of its counter."""
    if annotation := re.search(r'known_trip_count"?:\s*\{"?n"?:"?(\d+)', line):
        return int(annotation[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    text = "\n".join(computations.get(condition[1], ())) if condition else ""
    # Assumes that counters start at 0 and are compared by `<`: a single constant in the condition is then the bound.
    limits = re.findall(r"= s32\[\](?:\{[^}]*\})? constant\((\d+)\)", text)
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in text else None


# ---------------------------------------------------------------------------------------------------------------------
# Absent devices to compile for: TPUs (jax[tpu]), GPUs (jax[cuda12]), or simulated ones.

# GPU properties that XLA needs in addition to the memory size, from the vendor's tables: multiprocessors (SMs), float32
# lanes per SM, KiB of shared memory per SM and per block, MiB of L2 cache, GHz, compute capability.
GPUS = {"H100": (132, 128, 228, 227, 50, 1.98, (9, 0)), "H200": (132, 128, 228, 227, 50, 1.98, (9, 0)),
        "H100-PCIe": (114, 128, 228, 227, 50, 1.755, (9, 0)), "A100": (108, 64, 164, 163, 40, 1.41, (8, 0)),
        "A100-80GB": (108, 64, 164, 163, 40, 1.41, (8, 0)), "A100-PCIe": (108, 64, 164, 163, 40, 1.41, (8, 0)),
        "L4": (58, 128, 100, 99, 48, 2.04, (8, 9)), "L40S": (142, 128, 100, 99, 96, 2.52, (8, 9)),
        "A10": (72, 128, 100, 99, 6, 1.695, (8, 6)), "RTX4090": (128, 128, 100, 99, 72, 2.52, (8, 9))}


def plugin(on: Target) -> str | None:
    """Return the JAX plug-in package that compiles for a target; None if none is needed or exists."""
    if on.platform == "tpu":
        return "libtpu"
    return "jax_cuda12_plugin" if on.kind is not None and on.kind.name in GPUS else None


def has(package: str) -> bool:
    """Return True if this environment has the package."""
    return find_spec(package) is not None


def select_devices(on: Target) -> tuple[Sequence[jax.Device], bool]:
    """Return the devices to compile for, and True if this machine's CPU simulates them.

    Raises:
        UserError: JAX is already initialised, with too few devices to simulate the target.
    """
    jax.config.update("jax_platforms", "cpu")
    package = plugin(on)
    if package is None or not has(package):
        # Without the plug-in, simulate the target with as many virtual CPU devices.
        with suppress(RuntimeError):  # already initialised; the number of devices is checked below
            jax.config.update("jax_num_cpu_devices", on.num_devices)
        devices = jax.devices("cpu")[:on.num_devices]
        if len(devices) < on.num_devices:
            raise UserError(f"--on: JAX has already started with {len(devices)} devices, so it cannot simulate "
                            f"{on.num_devices}. Run the plan in a separate process.")
        return devices, on.platform != "cpu"
    if on.platform == "gpu":
        topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=_description(on),
                                                topology=f"1x1x{on.num_devices}")
    else:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to query
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # concurrent plans do not use a chip
        bounds = tpu_shape(on)
        # As a single host, so that all devices belong to this process.
        topology = topologies.get_topology_desc(
            platform="tpu", chips_per_host_bounds=bounds, wrap=tpu_rings(bounds, on.kind.cores == 1),
            topology_name=f"{on.kind.name}:" + "x".join(map(str, bounds[:2] if on.kind.cores == 1 else bounds)))
    return topology.devices[:on.num_devices], False


def tpu_shape(on: Target) -> tuple[int, int, int]:
    """Return the topology of a slice, as even as possible: 2D for v5e and v6e, 3D for v4 and v5p.

    Raises:
        UserError: The number of chips is not a power of two.
    """
    bits = on.num_devices.bit_length() - 1
    if on.num_devices != 1 << bits:
        raise UserError(f"--on: no slice of {on.kind.name} has {on.num_devices} chips. Use a power of two.")
    axes = 2 if on.kind.cores == 1 else 3
    # Divide the bits over the axes; the last axes get the remainder.
    shape = [1 << ((bits + axis) // axes) for axis in range(axes)]
    assert math.prod(shape) == on.num_devices
    return (*shape, 1)[:3] if axes == 2 else tuple(shape)


def tpu_rings(shape: tuple[int, int, int], is_plane: bool) -> tuple[bool, bool, bool]:
    """Return which axes of a slice have wrap-around links.

    All axes have them in full 16 x 16 pods of v5e and v6e, and in slices of v4 and v5p made of 4 x 4 x 4 cubes.
    """
    if is_plane:
        return (shape == (16, 16, 1),) * 2 + (False,)
    return (all(size % 4 == 0 for size in shape),) * 3


def _description(on: Target) -> str:
    """Return a GPU's description as XLA's GpuTargetConfigProto in text format."""
    cores, lanes, shared, block, cache, clock, (major, minor) = GPUS[on.kind.name]
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
          shared_memory_per_core: {shared * 1024} threads_per_core_limit: {2048 if minor == 0 else 1536}
          core_count: {cores} fpus_per_core: {lanes} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
          block_dim_limit_z: 65535 memory_bandwidth: {int(on.kind.bandwidth)} l2_cache_size: {cache * 2**20}
          clock_rate_ghz: {clock} device_memory_size: {int(on.memory)} shared_memory_per_block_optin: {block * 1024}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 28 }}
        runtime_version {{ major: 12 minor: 9 patch: 0 }}
        device_description_str: "NVIDIA {on.device}"
    """
