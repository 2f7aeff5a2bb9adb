"""Plan memory and compute of a training step on devices that may not be present, by running a step without values.

The recipe's own network is built, wrapped and trained for one optimiser step on tensors with shapes and dtypes only
(FakeTensorMode). CPU tensors represent GPU tensors, and a process group of the target's size, whose collectives do
nothing, represents its processes. The network is built for the target's device type, and sharded outside
FakeTensorMode, as the ranks of a device mesh are values.
"""

import copy
import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lmmods.core.errors import UserError
from lmmods.core.experts import mixture_of
from lmmods.core.hardware import USABLE, Target
from lmmods.core.labels import PER_ROW, has_tokens
from lmmods.core.plan import SamplingPlan, StepPlan, Traffic, Variant
from lmmods.data.base import DataModule
from lmmods.runs.schedule import RunLength
from lmmods.torch_engine.compat.bitsandbytes import outline_template
from lmmods.torch_engine.compat.lightning import give_mesh
from lmmods.torch_engine.compat.torch import (
    GROUPED,
    INDEXING,
    READING,
    DispatchMode,
    count_flops,
    grouped_product,
    has_values,
    keep_values,
    process_group_ranks,
    simulate_processes,
    tensors_in,
    watch_resizes,
    without_values,
)
from lmmods.torch_engine.compat.transformers import attention_name, can_change_attention
from lmmods.torch_engine.nn import sharding
from lmmods.torch_engine.nn.cpu_kernels import fast_products, stays_float32
from lmmods.torch_engine.nn.loading import COMPUTE_DTYPES
from lmmods.torch_engine.nn.optim import build_optimizer
from lmmods.torch_engine.precision import choose_precision
from lmmods.torch_engine.strategies.fsdp2 import FSDP2
from lmmods.torch_engine.tasks.base import TaskModule

# ---------------------------------------------------------------------------------------------------------------------
# Memory of a computation without values: each tensor's storage is tracked from its allocation until it is freed.
#
# Code that reads a value gets a fixed result: conditions (such as a kernel's check, or whether all tokens are real)
# are true, numbers are 1, and all elements of a mask (such as target or routed tokens) are set.

aten = torch.ops.aten
# Collectives by operator name, of process groups and of DTensor.
COLLECTIVES = {"_allgather_base_": "all-gather", "all_gather_into_tensor": "all-gather",
               "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor": "reduce-scatter",
               "allreduce_": "all-reduce", "all_reduce": "all-reduce"}
ANSWERS = {READING: lambda x: 1.0 if x.is_floating_point() else x.dtype == torch.bool or 1,
           aten.allclose.default: lambda _: True, aten.equal.default: lambda _: True,
           aten.nonzero.default: lambda x: x.new_empty((x.numel(), x.ndim), dtype=torch.long)}


class Ledger(DispatchMode):
    """Counter of bytes, FLOPs and collectives of operations while entered, within `without_values`.

    Args:
        vocab_size: Tensors of this width are labelled logits.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        super().__init__()
        self.flops = 0
        self.traffic: dict[tuple[str, int], Traffic] = {}  # by kind and number of processes
        # Operations on tensors with values, and new integers, have values: networks read the sizes of images.
        self.keeps_values = False
        self._vocab_size = vocab_size
        self._kinds: dict[int, str] = {}
        self._sizes: dict[int, int] = {}  # bytes of live storages, by index
        self._indices: dict[int, tuple[int, weakref.ref]] = {}  # by the storage's id
        self._num_seen = 0
        self._events: list[tuple[int, int]] = []  # a storage's index, and the change of its bytes
        self._before: dict[int, int] = {}
        self._offloaded: Callable[[], torch.UntypedStorage | None] = lambda: None
        self._hooks = ExitStack()

    def __enter__(self) -> "Ledger":
        self._hooks.enter_context(watch_resizes(self._resize))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hooks.close()

    def begin(self) -> None:
        """Start counting peak memory, FLOPs and collectives."""
        self.flops, self.traffic, self._events, self._before = 0, {}, [], dict(self._sizes)

    def name(self, kind: str, tensors: list[Tensor]) -> None:
        """Label tensors, also for the time before this call."""
        for tensor in tensors:
            self._kinds[self._index(tensor.untyped_storage())] = kind

    @property
    def num_seen(self) -> int:
        """Number of storages so far."""
        return self._num_seen

    def name_new(self, kind: str, first: int) -> None:
        """Label all live storages that have no label and were first seen when `num_seen` was `first` or more."""
        for index in self._sizes:
            if index >= first:
                self._kinds.setdefault(index, kind)

    def peak(self) -> dict[str, int]:
        """Return the bytes by kind at the peak since `begin`."""
        # Replay the changes: find the event after which the most bytes are live, then sum the storages up to it.
        total = peak_bytes = sum(self._before.values())
        end = 0
        for position, (_, change) in enumerate(self._events, 1):
            total += change
            if total > peak_bytes:
                peak_bytes, end = total, position
        sizes = Counter(self._before)
        for index, change in self._events[:end]:
            sizes[index] += change
        kinds: Counter[str] = Counter()
        for index, size in sizes.items():
            kinds[self._kinds.get(index, "temporaries")] += size
        return {kind: size for kind, size in kinds.items() if size}

    # Observed operations ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches again, with the operations on local shards
        if func in ANSWERS and not has_values(args[0]):
            return ANSWERS[func](args[0])
        keeps_values = self.keeps_values and _gives_values(func, args, kwargs)
        # The number of elements that a mask selects would be a value, so select all.
        if func in INDEXING and not keeps_values and any(x is not None and x.dtype == torch.bool for x in args[1]):
            args = (args[0], _select_all(args[1]), *args[2:])
        before = self._num_seen
        with keep_values() if keeps_values else nullcontext():
            result = (grouped_product if func is GROUPED and not has_values(args[0]) else func)(*args, **kwargs)
        if kwargs.get("pin_memory"):
            # The host's memory, for inputs of recomputed layers. They return one at a time, so count only the first one
            # of a forward pass, which is needed last.
            storage = result.untyped_storage()
            is_first = self._offloaded() is None
            self._index(storage, None if is_first else 0)
            self._offloaded = weakref.ref(storage) if is_first else self._offloaded
        # DTensor infers global shapes on the meta device; the ranks of a device mesh have values.
        new_tensors = [x for x in tensors_in(result) if keeps_values or not (x.is_meta or has_values(x))]
        for tensor in new_tensors:
            index = self._index(tensor.untyped_storage())
            # A storage made by this operation whose last dimension is the vocabulary.
            if index >= before and self._vocab_size in tensor.shape[-1:] and tensor.is_floating_point():
                self._kinds[index] = "logits"
        if new_tensors:
            self.flops += count_flops(func, args, kwargs, result)
        kind = COLLECTIVES.get(func.overloadpacket.__name__)
        if kind is not None:
            # For a gather or scatter, count the larger tensor, which is the whole one.
            sizes = [tensor.nbytes for tensor in tensors_in(args)]
            ranks = process_group_ranks(args)
            # Larger than the group if its ranks are not neighbours, as in a dimension of a mesh.
            span = ranks[-1] + 1 - ranks[0]
            new = Traffic(1, sum(sizes) if kind == "all-reduce" else max(sizes), len(ranks),
                          span if span > len(ranks) else 0)
            key = kind, len(ranks)
            self.traffic[key] = self.traffic.get(key, Traffic(0, 0, 1)).plus(new)
        return result

    def _index(self, storage: torch.UntypedStorage, num_bytes: int | None = None) -> int:
        """Return a storage's index; start counting a new storage, with `num_bytes` if it does not count in full."""
        storage_id = id(storage)
        # When torch frees the storage, the callback subtracts its bytes. The id may then be reused.
        if storage_id not in self._indices:
            index, self._num_seen = self._num_seen, self._num_seen + 1
            self._indices[storage_id] = index, weakref.ref(storage, lambda _: self._remove(storage_id))
            self._change(index, storage.nbytes() if num_bytes is None else num_bytes)
        return self._indices[storage_id][0]

    def _remove(self, storage_id: int) -> None:
        index, _ = self._indices.pop(storage_id)
        self._change(index, -self._sizes[index])
        del self._sizes[index]

    def _resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        index = self._index(storage)
        self._kinds[index] = "gathered parameters"  # only FSDP2 resizes storages
        self._change(index, num_bytes - self._sizes[index])

    def _change(self, index: int, num_bytes: int) -> None:
        self._sizes[index] = self._sizes.get(index, 0) + num_bytes
        self._events.append((index, num_bytes))


def _select_all(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Replace boolean masks among the indices by integer indices; masks without values as if all were true."""
    result: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool
        if is_mask and has_values(index):
            with keep_values():
                result += index.nonzero(as_tuple=True)
            continue
        result += [index.new_empty(index.numel(), dtype=torch.long)] * index.ndim if is_mask else [index]
    return result


def _gives_values(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return True if an operation needs only tensors with values, or none to make integers."""
    if tensors := tensors_in((args, kwargs)):
        return all(map(has_values, tensors))
    return func.overloadpacket is aten.arange or kwargs.get("dtype") in (torch.int32, torch.int64)


HAVE_VALUES = ("input_ids", "attention_mask", PER_ROW)  # columns, in plans of rows with images
BUCKETS = 2**20, 25 * 2**20  # bytes of DDP's gradient buckets: the first one, and the others
PARTS = ("parameters", "optimiser state", "gradients", "buckets of gradients", "rows", "activations", "logits",
         "gathered parameters", "temporaries")
Count = tuple[float, dict[tuple[str, int], Traffic]]  # FLOPs, and collectives by kind and number of processes
# Running counts at the end of each micro-batch, by pass (`survey`, `backward`), and at the end of the `step`.
Counts = dict[str, list[Count]]


class Planner:
    """Plans of one recipe on one target.

    Args:
        trainer: The recipe's trainer, but on this CPU.
        on: The target devices.
        strategy: `trainer.strategy` of the recipe.
        precision: `trainer.precision` of the recipe.

    Raises:
        UserError: Something in the recipe cannot be planned.
    """

    missing = None  # no device is required

    def __init__(self, trainer: Any, task: TaskModule, data: DataModule, on: Target, strategy: Any, precision: str):
        self.trainer, self.task, self.data, self.on, self._strategy = trainer, task, data, on, strategy
        if on.platform == "tpu":
            raise UserError(f"--on {on}: the torch engine does not support TPUs. Use --engine jax.")
        self.precision = self._precision(precision)
        data.trainer = trainer
        data.prepare_data()
        data.setup("fit")
        task.link(data)
        accumulate = trainer.accumulate
        trainer.accumulate *= self._num_ranks(strategy)  # so that a step includes the rows of all ranks
        self._loader = data.train_batches()
        trainer.accumulate = accumulate
        self.example = next(iter(self._loader))
        self._check()

    def _num_ranks(self, strategy: Any) -> int:
        """Return the number of micro-batches that the target computes in parallel."""
        sharers = ((strategy.tensor_parallel_size, strategy.context_parallel_size) if isinstance(strategy, FSDP2)
                   else (1, 1))
        return max(self.on.num_devices // math.prod(sharers), 1)

    def _precision(self, precision: str) -> str:
        if precision != "auto":
            return precision
        if self.on.platform == "cpu":
            return choose_precision("cpu")[0]
        return "bf16-mixed" if self.on.peak("bfloat16") else "32-true"

    def _check(self) -> None:
        task, strategy, name = self.task, self._strategy, type(self._strategy).__name__
        unsupported = {
            f"trainer.strategy {name}": not isinstance(strategy, str | FSDP2),
            f"trainer.strategy {strategy}": isinstance(strategy, str) and not _is_known(strategy),
            "model.quantize int8": task.quantize == "int8",
            "model.max_memory": task.max_memory is not None,
            "model.lora.dora with model.quantize": task.quantize and task.lora is not None and task.lora.dora,
            f"trainer.precision {self.precision}": self.precision not in COMPUTE_DTYPES,
        }
        if names := [name for name, is_on in unsupported.items() if is_on]:
            raise UserError(f"plan: on torch {', '.join(names)} cannot be planned. Remove that to plan the rest.")

    @property
    def may_shard(self) -> bool:
        """True if the recipe can run with strategy `fsdp`."""
        try:
            FSDP2().check_run(self.task)
        except UserError:
            return False
        return True

    def recipe(self) -> Variant:
        """Return the recipe's own variant."""
        task = self.task
        return Variant(self.data.batch_size, self.trainer.accumulate, task.gradient_checkpointing,
                       self._strategy, task.quantize, task.lora)

    @property
    def length(self) -> RunLength:
        """Length of the run."""
        trainer = self.trainer
        return RunLength(len(self._loader) * self.data.batch_size,
                         trainer.overfit_batches or trainer.train_limit, *trainer.length)

    def plan(self, variant: Variant) -> StepPlan:
        """Return the memory, FLOPs and collectives of an optimiser step.

        Raises:
            UserError: The network cannot be built, or not in this variant.
        """
        ranks = self.on.num_devices
        strategy = FSDP2() if variant.strategy == "fsdp" else variant.strategy
        is_sharded = ranks > 1 and isinstance(strategy, FSDP2)
        task = copy.copy(self.task)
        task.gradient_checkpointing, task.quantize, task.lora = variant.checkpointing, variant.quantize, variant.lora
        task.compile = False
        task.__post_init__()
        # Cache both here, as they need values.
        stays_float32()
        outline_template()
        sharers = (1, 1)
        if isinstance(strategy, FSDP2):
            strategy, task.trainer = copy.copy(strategy), self.trainer
            # Only their number matters, for `check_run`.
            strategy.parallel_devices = [torch.device("cpu")] * ranks
            strategy.check_run(task)
            sharers = strategy.tensor_parallel_size, strategy.context_parallel_size
        as_trained = task.fast_kernels and self.on.platform == "cpu"
        products = fast_products(torch.device("cpu")) if as_trained else nullcontext()
        with products, simulate_processes(ranks) if is_sharded else nullcontext():
            if is_sharded:
                names, shape = ("data_parallel", "tensor_parallel"), (ranks // sharers[0], sharers[0])
                give_mesh(task, init_device_mesh("cpu", shape, mesh_dim_names=names))
            return self._plan(task, variant, is_sharded, sharers)

    def _plan(self, task: TaskModule, variant: Variant, is_sharded: bool, sharers: tuple[int, int]) -> StepPlan:
        ranks, on_gpu = self.on.num_devices, self.on.platform == "gpu"
        ledger, no_values = Ledger(len(self.data.tokenizer)), without_values()
        task.trainer = stand_in(self.data, self.precision, variant.accumulated, self.trainer.clip_val, ranks,
                                "cuda" if on_gpu else "cpu", sharers)
        with no_values, ledger:
            task.build_model(abstract=True)
        with ledger:
            task.shard_model(one_document=True)
        with no_values, ledger:
            skip_masks_of_full_rows(task.model)
            task.prepare_model()
            optimizer = None
            if not task.optimizer.spec.is_bitsandbytes:  # whose steps need values
                optimizer = build_optimizer(task.named_parameters(), task.optimizer)
            gc.collect()
            ledger.name_new("parameters", 0)
            params = list(task.trainable().values())
            first = ledger.num_seen
            # Label storages by the time at which they are first seen.
            for param in params:
                param.grad = torch.zeros_like(param)
            ledger.name_new("gradients", first)
            first = ledger.num_seen
            if optimizer is not None:
                for group in optimizer.param_groups if on_gpu else ():  # torch's default on GPUs
                    group["foreach"] = not group.get("fused")
                optimizer.step()  # allocates the optimiser state
            ledger.name_new("optimiser state", first)
            rows, num_batches = self._pieces(task, variant)
            with keep_values():
                batch = full_batch(self.example, rows, self.data.max_length)
            has_images = any(name.startswith(PER_ROW) for name in batch)
            batch = {name: x if has_images and name.startswith(HAVE_VALUES) else torch.ones(x.shape, dtype=x.dtype)
                     for name, x in batch.items()}
            ledger.keeps_values = has_images
            ledger.name("rows", list(batch.values()))
            # The first sharded step also allocates full tensors, as DTensor infers the sharding of each operation.
            for _ in range(2 if is_sharded else 1):
                # The third and later micro-batches cost as much as the second; see `_count`.
                counts = self._step(task, optimizer, [batch] * min(num_batches, 2), ledger)
            gradients = [sharding.local(param.grad) for param in params if param.grad is not None]
            ledger.name("gradients", gradients)  # gradients of the last pass, which replace those above
            memory = ledger.peak()
        flops, traffic = _count(counts, num_batches)
        data_ranks = ranks // math.prod(sharers)
        if optimizer is None:
            memory["optimiser state"] = int(sum(grad.numel() for grad in gradients) * task.optimizer.spec.state_bytes)
        if ranks > 1 and not is_sharded:
            memory["buckets of gradients"] = size = sum(grad.nbytes for grad in gradients)
            traffic["all-reduce"] = Traffic(num_buckets([grad.nbytes for grad in gradients]), size, ranks)
        dtype = str(COMPUTE_DTYPES[self.precision]).removeprefix("torch.")
        return StepPlan(
            self.on, "simulated", {part: memory[part] for part in PARTS if part in memory}, {},
            self.on.usable_bytes(USABLE), None, traffic, flops, dtype,
            num_batches * batch["input_ids"].numel() * data_ranks, data_ranks,
            self._notes(task, optimizer), "simulated", method="counted on fake tensors",
            sampling=self._sampling(task, variant, is_sharded))

    def _sampling(self, task: TaskModule, variant: Variant, is_sharded: bool) -> SamplingPlan | None:
        """Return the cost of sampling a rank's answers; processes that share micro-batches sample the same answers."""
        load = task.sampling_load(variant.rows * variant.accumulated, self.data.eval_batch_size)
        if load is None:
            return None
        model, itemsize = task.model, COMPUTE_DTYPES[self.precision].itemsize
        looked_up = None if model.config.tie_word_embeddings else model.get_input_embeddings().weight
        weights = [(name, param.numel() * param.element_size()) for name, param in model.named_parameters()
                   if param is not looked_up]
        *counts, new_tokens = load
        sampling = SamplingPlan.of(model.config, *counts, (self.data.max_length, new_tokens), itemsize, weights)
        if not is_sharded:
            return sampling
        # Each token gathers the parameters in the type of the products.
        gathered = sum(param.numel() * (itemsize if param.is_floating_point() else param.element_size())
                       for param in model.parameters())
        return replace(sampling, gathered=gathered, group=self.on.num_devices)

    def _pieces(self, task: TaskModule, variant: Variant) -> tuple[int, int]:
        """Return the number of rows per chunk and of chunks per optimiser step; turn off chunking in the task."""
        size = 0
        if self.on.platform == "cpu":
            size = task.chunk_tokens()
        task.piece_tokens = 0  # a chunk is planned as a separate micro-batch
        if not size:
            return variant.rows, variant.accumulated
        ids = self.example["input_ids"]
        answers = ids[0].numel() // ids.shape[-1]
        rows = min(max(size // (answers * self.data.max_length), 1), variant.rows)
        return rows, -(-variant.rows // rows) * variant.accumulated

    def _step(self, task: TaskModule, optimizer: Any, batches: list[dict[str, Tensor]], ledger: Ledger) -> Counts:
        """Run an optimiser step; return the running counts at the end of its passes."""
        counts: Counts = {"survey": [], "backward": []}
        first = ledger.num_seen

        def on_pass(name: str) -> None:
            nonlocal first
            if name == "forward":
                ledger.name_new("activations", first)
            else:
                counts[name].append((ledger.flops, dict(ledger.traffic)))
            first = ledger.num_seen

        ledger.begin()
        take_step(task, optimizer, batches, on_pass)
        return counts | {"step": [(ledger.flops, dict(ledger.traffic))]}

    def _notes(self, task: TaskModule, optimizer: Any) -> list[str]:
        notes = [f"rows have the maximum length, {self.data.max_length} tokens, and all tokens are targets"]
        if self.on.platform == "gpu":
            notes += [f"{1 - USABLE:.0%} of a GPU's memory is reserved for CUDA, NCCL and fragmentation",
                      "attention is counted as in torch's flash kernel"]
            if getattr(self.data, "packing", False):
                notes.append("packed rows are planned with masks, which torch's kernel for them does not need")
        if task.context_parallel is not None and getattr(self.data, "packing", False):
            notes.append("a split packed row is planned as one document, the most expensive case")
        if (mixture := mixture_of(task.model.config)) is not None:
            notes.append(f"each token uses {mixture.per_token} of {mixture.num} experts, and even load is assumed: "
                         "uneven load changes the speed, but not memory and FLOPs")
            over = task.device_mesh["data_parallel"].size() if task.device_mesh is not None else 1
            if mixture.num % over:
                notes.append(f"fsdp gives each device whole experts: {mixture.num} on {over} devices cost as much as "
                             f"{-(-mixture.num // over) * over} experts. Use a number of devices that divides "
                             f"{mixture.num}")
        if any(name.startswith(PER_ROW) for name in self.example):
            notes.append("each row has the images of one row, which has the most pixels in the first batch")
        if optimizer is None:
            notes.append(f"the state of {task.optimizer.name} is computed from its bytes per parameter")
        if self.task.compile:
            notes.append("planned without model.compile")
        return notes


def num_buckets(sizes: list[int]) -> int:
    """Return the number of all-reduces that DDP needs for gradients of these bytes, in the order of the parameters."""
    # DDP fills buckets from the last parameter on, as gradients arrive, and its first bucket is smaller.
    count, filled, limit = 0, 0, BUCKETS[0]
    for size in reversed(sizes):
        filled += size
        if filled >= limit:
            count, filled, limit = count + 1, 0, BUCKETS[1]
    return count + (filled > 0)


def skip_masks_of_full_rows(model: nn.Module) -> None:
    """Omit sdpa's mask if rows without padding need none: transformers would have to read the padding mask."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
        if sdpa_mask(*args, attention_mask=None, **options) is None:
            return None
        return sdpa_mask(*args, attention_mask=attention_mask, **options)

    name = attention_name(model)
    if AttentionMaskInterface().get(name) is sdpa_mask and can_change_attention(model):
        full_rows = f"{name}_full_rows"
        AttentionInterface.register(full_rows, AttentionInterface()[name])
        AttentionMaskInterface.register(full_rows, mask)
        model.set_attn_implementation(full_rows)


def _is_known(strategy: str) -> bool:
    return strategy in ("auto", "fsdp") or strategy.startswith("ddp")


def _count(counts: Counts, num_batches: int) -> tuple[float, dict[str, Traffic]]:
    """Return FLOPs and collectives of a step; the third and later of its `num_batches` cost as much as the second."""
    [(flops, traffic)] = counts["step"]
    more = num_batches - 2
    for running in (counts["survey"], counts["backward"]) if more > 0 else ():
        if not running:
            continue
        (before, earlier), (after, later) = running  # the difference is the cost of the second micro-batch
        flops += more * (after - before)
        for kind, total in later.items():
            old = earlier.get(kind, Traffic(0, 0, 1))
            one = Traffic(total.count - old.count, total.num_bytes - old.num_bytes, total.group)
            traffic[kind] = traffic[kind].plus(one, more)
    largest = dict(sorted(traffic))  # largest group of each kind, as later keys overwrite earlier ones
    return flops, {kind if group == largest[kind] else f"{kind} of {group}": totals
                   for (kind, group), totals in traffic.items()}


# ---------------------------------------------------------------------------------------------------------------------
# A training step outside Lightning's loops, in the same order; without values for planning, with values for measuring.

class Ranks:
    """Replacement for a Lightning strategy with several processes, with the attributes that a task uses.

    Args:
        root_device: Device of the first process.
        tensor_parallel_size: As in `strategies.FSDP2`; likewise `context_parallel_size`.
    """

    global_rank = 0

    def __init__(self, root_device: torch.device, world_size: int, tensor_parallel_size: int = 1,
                 context_parallel_size: int = 1):
        self.root_device, self.world_size = root_device, world_size
        self.tensor_parallel_size, self.context_parallel_size = tensor_parallel_size, context_parallel_size


def stand_in(data: DataModule, precision: str, accumulated: int, clip_val: float | None, ranks: int = 1,
             device: str = "cpu", sharers: tuple[int, int] = (1, 1)) -> Any:
    """Return a replacement for Lightning's trainer, with the attributes that a task uses.

    Args:
        precision: Lightning's name of the precision.
        accumulated: Number of micro-batches per optimiser step.
        clip_val: Maximum gradient norm; None does not clip.
        ranks: Number of processes.
        device: Device for which the network is built.
        sharers: Sizes of tensor and context parallelism.
    """
    root_device = torch.device(device)
    strategy = SingleDeviceStrategy(root_device) if ranks == 1 else Ranks(root_device, ranks, *sharers)
    plugin = Precision()
    if precision.endswith("true") and precision != "32-true":
        plugin = HalfPrecision(precision)
    elif precision.endswith("mixed"):
        scaler = torch.amp.GradScaler("cpu", enabled=False) if precision == "16-mixed" else None
        plugin = MixedPrecision(precision, "cpu", scaler)
    return SimpleNamespace(datamodule=data, strategy=strategy, precision=precision, precision_plugin=plugin,
                           accumulate=accumulated, num_data_ranks=ranks // math.prod(sharers), data_rank=0,
                           clip_val=clip_val, gradient_clip_algorithm=None,
                           batches_per_step=accumulated * ranks // math.prod(sharers), current_epoch=0, global_step=0,
                           world_size=ranks)


def full_batch(example: dict[str, Tensor], rows: int, max_length: int) -> dict[str, Tensor]:
    """Return a micro-batch of rows of maximum length, filled with ones, so that all tokens are real and targets.

    With images, each row starts with the example's row that has the most pixels.

    Args:
        example: A micro-batch of the loader.
    """
    axis = example["input_ids"].ndim - 1
    full, images = {}, [name for name in example if name.startswith(PER_ROW)]
    num_pixels = [example[name].flatten(1).count_nonzero(1) for name in images if example[name].is_floating_point()]
    source = int(sum(num_pixels).argmax()) if num_pixels else 0
    for name, x in example.items():
        is_long = has_tokens(name, x.ndim, x.is_floating_point(), axis)
        length = (max_length,) if is_long else x.shape[axis:axis + 1]
        full[name] = torch.ones((rows, *x.shape[1:axis], *length, *x.shape[axis + 1:]), dtype=x.dtype)
        if name in images:
            full[name] = x[[source] * rows]
        elif name == "input_ids" and images:
            full[name][..., :x.shape[axis]] = x[source]
    return full


def take_step(module: TaskModule, optimizer: torch.optim.Optimizer | None, batches: list[dict[str, Tensor]],
              on_pass: Callable[[str], None] = lambda _: None) -> None:
    """Run one optimiser step, as `TaskModule.training_step` does.

    Args:
        optimizer: None stops after the gradients.
        on_pass: Called with the name of each pass at its end: `survey`, `forward`, `backward`.
    """
    def surveyed() -> Iterator[dict[str, Tensor]]:
        for batch in batches:
            yield batch
            on_pass("survey")

    def backward(loss: Tensor) -> None:
        on_pass("forward")
        loss.backward()
        on_pass("backward")

    for param in module.parameters():
        param.grad = None
    module.survey(surveyed())
    module.add_gradients(batches, 0, backward)
    module.on_before_optimizer_step(optimizer or SimpleNamespace(
        param_groups=[{"params": list(module.trainable().values()), "lr": 0.0}]))
    if optimizer is not None:
        optimizer.step()
