"""What a training step of a recipe needs on devices that need not be here: the step itself, without values.

The recipe's own network is built, wrapped and trained for a step on tensors that have shapes and types alone. Tensors
of this processor stand in for those of a GPU; a process group of the wanted size, whose collectives do nothing, for
the others.
"""

import copy
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lmmods.core.errors import UserError
from lmmods.core.experts import mixture_of
from lmmods.core.hardware import Target
from lmmods.core.model_sizes import STATE_BYTES
from lmmods.core.plan import StepPlan, Traffic, Variant
from lmmods.runs.schedule import RunLength
from lmmods.torch_engine.bare_step import full_batch, stand_in, take_step
from lmmods.torch_engine.compat.lightning import give_mesh
from lmmods.torch_engine.compat.torch import imagined_processes, without_values
from lmmods.torch_engine.compat.transformers import without_padding
from lmmods.torch_engine.ledger import Ledger
from lmmods.torch_engine.nn import sharding
from lmmods.torch_engine.nn.cpu_kernels import stays_float32
from lmmods.torch_engine.nn.cut_rows import blocks_of_gpus
from lmmods.torch_engine.nn.loading import COMPUTE_DTYPES
from lmmods.torch_engine.nn.loss import chunks_of_gpus
from lmmods.torch_engine.nn.optim import build_optimizer
from lmmods.torch_engine.precision import choose_precision
from lmmods.torch_engine.strategies.fsdp2 import FSDP2
from lmmods.torch_engine.tasks.base import TaskModule

ROOM = 0.9  # of a GPU's memory
BUCKETS = 2**20, 25 * 2**20  # bytes of gradients that DDP adds up at a time: the first, and each after it
STEPPING = ("adamw", "sgd", "adafactor")  # optimisers that can step without values
PARTS = ("parameters", "optimiser state", "gradients", "buckets of gradients", "rows", "activations", "logits",
         "gathered parameters", "temporaries")
Count = tuple[float, dict[tuple[str, int], Traffic]]  # arithmetic and collectives, by kind and processes
Counts = dict[str, list[Count]]  # at the end of each micro-batch, by pass (`survey`, `backward`), and of the `step`


class Planner:
    """Plans of one recipe on one target.

    Args:
        trainer: Of the recipe, but on this processor.
        on: The target.
        strategy: `trainer.strategy` of the recipe.
        precision: `trainer.precision` of the recipe.

    Raises:
        UserError: Something in the recipe cannot be planned.
    """

    missing = None  # nothing but this processor is needed

    def __init__(self, trainer: Any, task: TaskModule, data: Any, on: Target, strategy: Any, precision: str):
        self.trainer, self.task, self.data, self.on, self._strategy = trainer, task, data, on, strategy
        if on.platform == "tpu":
            raise UserError(f"--on {on}: the torch engine trains on no TPU. Plan it with --engine jax.")
        self.precision = self._precision(precision)
        data.trainer = trainer
        data.prepare_data()
        data.setup("fit")
        self._loader = data.train_dataloader()
        self.example = next(iter(self._loader))
        self._check()

    def _precision(self, asked: str) -> str:
        if asked != "auto":
            return asked
        if self.on.platform == "cpu":
            return choose_precision("cpu")[0]
        return "bf16-mixed" if self.on.peak("bfloat16") else "32-true"

    def _check(self) -> None:
        task, strategy, name = self.task, self._strategy, type(self._strategy).__name__
        refused = {
            f"trainer.strategy {name}": not isinstance(strategy, str | FSDP2),
            f"trainer.strategy {strategy}": isinstance(strategy, str) and not _is_known(strategy),
            "model.quantize int8": task.quantize == "int8",
            "model.max_memory": task.max_memory is not None,
            "model.lora.dora with model.quantize": task.quantize and task.lora is not None and task.lora.dora,
            f"trainer.precision {self.precision}": self.precision not in COMPUTE_DTYPES,
        }
        if names := [name for name, is_on in refused.items() if is_on]:
            raise UserError(f"plan: on torch {', '.join(names)} cannot be planned. Take that out to plan the rest.")

    @property
    def may_shard(self) -> bool:
        """Whether the recipe can go on with `fsdp`."""
        try:
            FSDP2().check_run(self.task)
        except UserError:
            return False
        return True

    def recipe(self) -> Variant:
        """The recipe as it is."""
        task = self.task
        return Variant(self.data.batch_size, self.trainer.accumulate_grad_batches, task.gradient_checkpointing,
                       self._strategy, task.quantize, task.lora)

    @property
    def length(self) -> RunLength:
        """Of the run."""
        trainer = self.trainer
        return RunLength(len(self._loader) * self.data.batch_size,
                         trainer.overfit_batches or trainer.limit_train_batches, *trainer.length)

    def plan(self, variant: Variant) -> StepPlan:
        """What a step needs.

        Raises:
            UserError: The network cannot be made, or not so.
        """
        ranks = self.on.num_devices
        strategy = FSDP2() if variant.strategy == "fsdp" else variant.strategy
        is_sharded = ranks > 1 and isinstance(strategy, FSDP2)
        task = copy.copy(self.task)
        task.gradient_checkpointing, task.quantize, task.lora = variant.checkpointing, variant.quantize, variant.lora
        task.compile = False
        task.__post_init__()
        stays_float32()  # is found out with values
        on_gpu, sharers = self.on.platform == "gpu", (1, 1)
        if isinstance(strategy, FSDP2):
            strategy, task.trainer = copy.copy(strategy), self.trainer
            strategy.parallel_devices = [torch.device("cpu")] * ranks
            strategy.check_run(task)
            sharers = strategy.tensor_parallel_size, strategy.context_parallel_size
        with imagined_processes(ranks) if is_sharded else nullcontext():
            if is_sharded:
                names, shape = ("data_parallel", "tensor_parallel"), (ranks // sharers[0], sharers[0])
                give_mesh(task, init_device_mesh("cpu", shape, mesh_dim_names=names))
            with without_values(), without_padding(), _as_on_gpus() if on_gpu else nullcontext():
                return self._plan(task, variant, is_sharded, sharers)

    def _plan(self, task: TaskModule, variant: Variant, is_sharded: bool, sharers: tuple[int, int]) -> StepPlan:
        ranks, on_gpu = self.on.num_devices, self.on.platform == "gpu"
        ledger = Ledger(len(self.data.tokenizer))
        with ledger:
            task.trainer = stand_in(self.data, self.precision, variant.accumulated, ranks, "cuda" if on_gpu else "cpu",
                                    sharers)
            task.configure_model()
            optimizer = None
            if task.optimizer.name in STEPPING:
                optimizer = build_optimizer(task.named_parameters(), task.optimizer)
            gc.collect()
            ledger.name_new("parameters", 0)
            params = list(task.trainable().values())
            first = ledger.num_seen
            for param in params:
                param.grad = torch.zeros_like(param)
            ledger.name_new("gradients", first)
            first = ledger.num_seen
            if optimizer is not None:
                for group in optimizer.param_groups if on_gpu else ():  # torch's choice there
                    group["foreach"] = not group.get("fused")
                optimizer.step()
            ledger.name_new("optimiser state", first)
            rows, num_batches = self._pieces(task, variant)
            batch = full_batch(self.example, rows, self.data.max_length)
            ledger.name("rows", list(batch.values()))
            # The first sharded step makes whole tensors too, to see how operations cut them.
            for _ in range(2 if is_sharded else 1):
                counts = self._step(task, optimizer, [batch] * min(num_batches, 2), ledger)
            gradients = [sharding.local(param.grad) for param in params if param.grad is not None]
            ledger.name("gradients", gradients)
            memory = ledger.peak()
        flops, traffic = _counted(counts, num_batches)
        data_ranks = ranks // math.prod(sharers)
        if optimizer is None:
            memory["optimiser state"] = int(sum(grad.numel() for grad in gradients) * STATE_BYTES[task.optimizer.name])
        if ranks > 1 and not is_sharded:
            memory["buckets of gradients"] = size = sum(grad.nbytes for grad in gradients)
            traffic["all-reduce"] = Traffic(num_buckets([grad.nbytes for grad in gradients]), size, ranks)
        dtype = str(COMPUTE_DTYPES[self.precision]).removeprefix("torch.")
        return StepPlan(
            self.on, "simulated", {part: memory[part] for part in PARTS if part in memory}, {}, self.on.room(ROOM),
            None, traffic, flops, dtype, num_batches * batch["input_ids"].numel() * data_ranks, data_ranks,
            self._notes(task, optimizer), "simulated")

    def _pieces(self, task: TaskModule, variant: Variant) -> tuple[int, int]:
        """Rows that are computed at a time, and how often in a step; from here on the task cuts nothing itself."""
        size = 0
        if self.on.platform == "cpu":
            size = task.piece_size()
        task.piece_tokens = 0
        if not size:
            return variant.rows, variant.accumulated
        ids = self.example["input_ids"]
        answers = ids[0].numel() // ids.shape[-1]
        rows = min(max(size // (answers * self.data.max_length), 1), variant.rows)
        return rows, -(-variant.rows // rows) * variant.accumulated

    def _step(self, task: TaskModule, optimizer: Any, batches: list[dict[str, Tensor]], ledger: Ledger) -> Counts:
        """A step; what had been counted by the end of its parts."""
        counts: Counts = {"survey": [], "backward": []}
        first = ledger.num_seen

        def seen(passed: str) -> None:
            nonlocal first
            if passed == "forward":
                ledger.name_new("activations", first)
            else:
                counts[passed].append((ledger.flops, dict(ledger.traffic)))
            first = ledger.num_seen

        ledger.begin()
        take_step(task, optimizer, batches, (self.trainer.gradient_clip_val, None), seen)
        return counts | {"step": [(ledger.flops, dict(ledger.traffic))]}

    def _notes(self, task: TaskModule, optimizer: Any) -> list[str]:
        notes = [f"rows are as long as they may be, {self.data.max_length} tokens, and all of them are scored"]
        if self.on.platform == "gpu":
            notes += [f"{1 - ROOM:.0%} of a GPU's memory is left to CUDA, NCCL and what lies between blocks",
                      "attention is counted as torch's flash kernel takes it"]
            if getattr(self.data, "packing", False):
                notes.append("packed rows are planned with masks, which torch's kernel for them does without")
        if task.cut_rows is not None and getattr(self.data, "packing", False):
            notes.append("a packed row that is cut is planned as one document, which is the most that it can take")
        if (mixture := mixture_of(task.model.config)) is not None:
            notes.append(f"each token takes {mixture.per_token} of {mixture.num} experts, which are taken as evenly "
                         "loaded: memory and arithmetic are the same however they are, the speed is not")
            over = task.device_mesh["data_parallel"].size() if task.device_mesh is not None else 1
            if mixture.num % over:
                notes.append(f"fsdp gives each device whole experts: {mixture.num} over {over} devices move and take "
                             f"as much as {-(-mixture.num // over) * over} would. Take a number of devices that "
                             f"divides {mixture.num}")
        if optimizer is None:
            notes.append(f"the state of {task.optimizer.name} is arithmetic on its bytes for each parameter")
        if self.task.compile:
            notes.append("planned without model.compile")
        return notes


def num_buckets(sizes: list[int]) -> int:
    """How many all-reduces DDP makes of gradients of these bytes, which come in the order of their parameters."""
    count, filled, limit = 0, 0, BUCKETS[0]
    for size in reversed(sizes):
        filled += size
        if filled >= limit:
            count, filled, limit = count + 1, 0, BUCKETS[1]
    return count + (filled > 0)


@contextmanager
def _as_on_gpus() -> Iterator[None]:
    with chunks_of_gpus(), blocks_of_gpus():
        yield


def _is_known(strategy: str) -> bool:
    return strategy in ("auto", "fsdp") or strategy.startswith("ddp")


def _counted(counts: Counts, num_batches: int) -> tuple[float, dict[str, Traffic]]:
    """Arithmetic and collectives of a step of so many micro-batches; those behind the second count as it does."""
    [(flops, traffic)] = counts["step"]
    more = num_batches - 2
    for found in (counts["survey"], counts["backward"]) if more > 0 else ():
        if not found:
            continue
        (before, earlier), (after, later) = found
        flops += more * (after - before)
        for kind, total in later.items():
            old = earlier.get(kind, Traffic(0, 0, 1))
            one = Traffic(total.count - old.count, total.num_bytes - old.num_bytes, total.group)
            traffic[kind] = traffic[kind].plus(one, more)
    largest = dict(sorted(traffic))  # of each kind
    return flops, {kind if group == largest[kind] else f"{kind} of {group}": found
                   for (kind, group), found in traffic.items()}
