"""Requirements of a training step on devices that need not be present, and estimates for the whole run."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from lmmods.core.experts import mixture_of
from lmmods.core.hardware import Target
from lmmods.core.memory import GIB, Method, StepMemory, cache_bytes
from lmmods.core.settings import LoRA

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# compiled: from the target's own compiler. simulated: counted in the program of simulated devices on this machine, or
# in a step on meta tensors. assumed: calculated, not confirmed by the device.
Source = Literal["compiled", "simulated", "assumed"]
# Fraction of a collective's whole array that each of n devices sends, multiplied by (n - 1) / n (ring algorithms).
_SENT = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}


@dataclass(frozen=True)
class Variant:
    """The settings of a recipe that a plan may change.

    Args:
        rows: Rows of a micro-batch on each rank.
        accumulated: Micro-batches of a step.
        strategy: `trainer.strategy`.
        changed: Changed keys of the recipe, as text.
    """

    rows: int
    accumulated: int
    checkpointing: bool | str
    strategy: Any
    quantize: str | None
    lora: LoRA | None
    changed: tuple[str, ...] = ()

    def smaller(self) -> Iterator["Variant"]:
        """Yield variants with the same rows per step and fewer per micro-batch, down to one."""
        rows, accumulated = self.rows, self.accumulated
        while rows > 1:
            factor = next(divisor for divisor in range(2, rows + 1) if rows % divisor == 0)
            rows, accumulated = rows // factor, accumulated * factor
            yield replace(self, rows=rows, accumulated=accumulated, changed=(
                *self.changed, f"data.batch_size: {rows}, trainer.accumulate_grad_batches: {accumulated}"))


def remedies(recipe: Variant, num_devices: int, may_quantize: bool, may_shard: bool = True) -> list[Variant]:
    """Return ways to save memory, the cheapest first; each includes those before it.

    Args:
        may_quantize: True if the model starts from weights, which can be frozen.
        may_shard: True if the rest of the recipe supports `fsdp`.
    """
    variants, last = [], recipe
    if not recipe.checkpointing:
        last = replace(last, checkpointing=True, changed=(*last.changed, "model.gradient_checkpointing: true"))
        variants.append(last)
    if may_shard and num_devices > 1 and recipe.strategy in ("auto", "ddp"):
        last = replace(last, strategy="fsdp", changed=(*last.changed, "trainer.strategy: fsdp"))
        variants.append(last)
    if may_quantize and recipe.quantize is None:
        lora = recipe.lora or LoRA(rank=16, alpha=32, dropout=0.05)
        added = () if recipe.lora else ("model.lora: {rank: 16, alpha: 32, dropout: 0.05}",)
        variants.append(replace(last, quantize="nf4", lora=lora,
                                changed=(*last.changed, *added, "model.quantize: nf4")))
    return variants


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a step.

    Args:
        count: Number of collectives per device.
        num_bytes: Total size of the whole arrays: the result of an all-gather, the input of a reduce-scatter or an
            all-reduce.
        group: Number of devices in one collective.
        span: Number of neighbouring devices that contains the group; 0: the group consists of neighbours.
    """

    count: int
    num_bytes: int
    group: int
    span: int = 0

    def plus(self, other: "Traffic", times: int = 1) -> "Traffic":
        """Return the sum of both, the other `times` times; groups and spans are the larger ones."""
        return Traffic(self.count + times * other.count, self.num_bytes + times * other.num_bytes,
                       max(self.group, other.group), max(self.span, other.span))

    def sent(self, kind: str) -> float:
        """Return the bytes that each device sends."""
        return _SENT.get(kind.partition(" ")[0], 1) * self.num_bytes * (self.group - 1) / max(self.group, 1)


@dataclass(frozen=True)
class SamplingPlan:
    """Sampling of the answers that training needs, on a device.

    Args:
        answers: Number of answers that the device samples.
        at_once: Number of answers sampled together.
        steps: Number of optimiser steps that train on them.
        new_tokens: Number of tokens per answer.
        weights: Bytes of the weights, which are read for each token of the answers sampled together.
        cache: Bytes of keys and values that are read to sample an answer.
        held: Bytes of keys and values of a whole answer with its prompt.
        gathered: Bytes of the weights if each of `group` devices has a part of them, which it sends for each token.
    """

    answers: int
    at_once: int
    steps: int
    new_tokens: int
    weights: float
    cache: float
    held: float
    gathered: float = 0.0
    group: int = 1

    @staticmethod
    def of(config: "PreTrainedConfig", answers: int, at_once: int, steps: int, lengths: tuple[int, int], itemsize: int,
           weights: Iterable[tuple[str, float]], num_devices: int = 1) -> "SamplingPlan":
        """Return the sampling of answers of maximum length to prompts of maximum length.

        Args:
            config: transformers configuration.
            lengths: Number of tokens in a prompt with its answer, and in the answer alone.
            itemsize: Bytes of an element of a key or value.
            weights: Names and bytes of all weights that are read; weights of experts have `experts` in their names.
            num_devices: Number of devices that share the work on each answer.
        """
        at_once, (length, new_tokens) = min(at_once, answers), lengths
        mixture = mixture_of(config)
        expert_fraction = 1.0 if mixture is None else min(at_once * mixture.per_token / mixture.num, 1.0)
        weight_bytes = sum(num_bytes * (expert_fraction if "experts" in name else 1) for name, num_bytes in weights)
        cache_read = sum(cache_bytes(config, position, itemsize) for position in range(length - new_tokens, length))
        return SamplingPlan(answers, at_once, steps, new_tokens, weight_bytes / num_devices, cache_read / num_devices,
                            cache_bytes(config, length, itemsize) / num_devices)

    def seconds(self, target: Target) -> float | None:
        """Return the minimum sampling time of an optimiser step; None if the target's figures are unknown."""
        passes = -(-self.answers // self.at_once) * self.new_tokens
        read_seconds = target.access_seconds(passes * self.weights + self.answers * self.cache)
        bandwidth = target.link(self.group)
        if read_seconds is None or bandwidth is None:
            return None
        send_seconds = passes * self.gathered * (self.group - 1) / self.group / bandwidth
        return max(read_seconds, send_seconds) / self.steps


@dataclass(frozen=True)
class StepPlan:
    """Requirements of an optimiser step on each device.

    Args:
        source: Source of memory and collectives.
        memory: Bytes by part.
        parts: Rough bytes by part of the temporaries among them.
        available: Bytes available to a run.
        refusal: Error of the compiler; None if the program compiles.
        traffic: Collectives by kind; if groups of a kind differ in size, the smaller ones as `KIND of N`.
        flops: Floating-point operations.
        dtype: Type of the matrix products.
        num_tokens: Number of tokens on all devices, padding included.
        notes: Further assumptions.
        counted: Source of `flops`.
        kernels: Number of calls of each fused attention kernel in the programs.
        method: How `memory` was found.
        sampling: Answers that are sampled for the step, if any; their time is added to `bounds`.
        gap: As in `StepMemory`, for the temporaries.
    """

    target: Target
    source: Source
    memory: dict[str, int]
    parts: dict[str, int]
    available: float
    refusal: str | None
    traffic: dict[str, Traffic]
    flops: float
    dtype: str
    num_tokens: int
    ranks: int
    notes: list[str] = field(default_factory=list)
    counted: Source = "assumed"
    kernels: dict[str, int] = field(default_factory=dict)
    method: Method = "compiled by XLA"
    sampling: SamplingPlan | None = None
    gap: float = math.inf

    @property
    def step_memory(self) -> StepMemory:
        """Memory of each device, as a step's memory on either engine."""
        on_tpu = self.source == "compiled" and self.target.platform == "tpu"  # whose compiler may offload to the host
        return StepMemory(self.memory, self.available, self.method, self.refusal, on_tpu,
                          self.memory.get("temporaries", 0), self.gap)

    @property
    def total(self) -> int:
        """Peak bytes of each device."""
        return self.step_memory.needed

    @property
    def kept(self) -> int:
        """Bytes that persist between steps, independent of the rows."""
        return sum(self.memory.get(part, 0) for part in ("parameters", "optimiser state"))

    @property
    def fits(self) -> bool:
        """True if the memory suffices."""
        return self.step_memory.fits

    def bounds(self) -> dict[str, float]:
        """Return minimum times of a step in seconds, by resource; empty if the target's figures are unknown."""
        target, links = self.target, 0.0
        # Parameters and optimiser state are read and written once.
        peak, memory = target.peak(self.dtype), target.access_seconds(2 * self.kept)
        if peak is None or memory is None:
            return {}
        for kind, traffic in self.traffic.items():
            link = target.link(max(traffic.group, traffic.span))
            assert link is not None, "known like the memory's"
            links += traffic.sent(kind) / link
        return {"arithmetic": self.flops / peak, "links": links, "memory": memory}

    def lines(self, num_steps: int | None) -> Iterator[str]:
        """Yield the lines of the plan, each with its source.

        Args:
            num_steps: Number of steps in the run; None if it is unlimited.
        """
        memory = self.step_memory
        verdict = "fits, but only just" if memory.is_tight else "fits" if memory.fits else "does not fit"
        yield _line("memory of each device", self.source, f"{verdict}: {memory}")
        yield from (_line(f"  {part}", self.source, _size(size)) for part, size in self.memory.items())
        yield from (_line(f"    {part}", "assumed", f"about {_size(size)}") for part, size in self.parts.items())
        if self.refusal:
            yield _line("compiler", self.source, self.refusal)
        if self.kernels:
            yield _line("fused attention", self.source, ", ".join(f"{name} x {n}" for name, n in self.kernels.items()))
        for kind, traffic in sorted(self.traffic.items()):
            yield _line(kind, self.source, f"{traffic.count} a step, {_size(traffic.num_bytes)} among "
                        f"{traffic.group} devices")
        yield _line("arithmetic of a step", self.counted, f"{self.flops / 1e12:,.3g} TFLOP on each device")
        if self.sampling:
            sampling = self.sampling
            yield _line("answers", "assumed", f"{sampling.answers} on each device that samples, for "
                        f"{sampling.steps} step{'s' if sampling.steps > 1 else ''}, {sampling.at_once} at once, whose "
                        f"keys and values take {_size(sampling.at_once * sampling.held)}")
        if bounds := self.bounds():
            details = ", ".join(f"{name} {_time(value)}" for name, value in bounds.items())
            sampling_seconds = (self.sampling.seconds(self.target) if self.sampling else None) or 0.0
            seconds = max(bounds.values()) + sampling_seconds
            if sampling_seconds:
                details = (f"{_time(max(bounds.values()))} to train: {details}; {_time(sampling_seconds)} to sample "
                           "answers")
            yield _line("a step takes at least", "assumed", f"{_time(seconds)} ({details})")
            yield _line("so at most", "assumed", f"{self.num_tokens / seconds:,.0f} tokens per second, "
                        f"{self.num_tokens:,} a step")
            if self.sampling and sampling_seconds:
                yield _line("sampling takes at least", "assumed", f"{sampling_seconds / seconds:.0%} of it, if all "
                            f"answers have {self.sampling.new_tokens} tokens, each of which reads the weights and the "
                            "cache")
            if num_steps is not None:
                hours = num_steps * seconds / 3600 * self.target.num_devices
                yield _line("the whole run at least", "assumed", f"{num_steps:,} steps, {_time(num_steps * seconds)}, "
                            f"{hours:,.3g} device-hours")
        else:
            yield _line("time", "assumed", "not bounded: no data sheet of this device is known")
        yield from (_line("note", "assumed", note) for note in self.notes)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.2f} MiB"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 3600:,.3g} hours"


def _line(name: str, source: Source, text: str) -> str:
    return f"{name:<26}{source:<11}{text}"
