"""Settings that both engines read: plain dataclasses, no torch, no jax.

Each field's line of documentation is what `--help` prints.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, get_args

from lmmods.core.errors import UserError, refuse_value
from lmmods.core.optimizers import OPTIMIZERS, OptimizerName, OptimizerSpec

# Muon's coefficients of a Newton-Schulz iteration, and the minimum norm that a matrix is divided by, as in
# torch.optim.Muon.
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_EPS = 1e-7


def decays(name: str, num_dims: int) -> bool:
    """Return True if weight decay applies to a parameter: not to biases, which in experts have several rows."""
    return num_dims >= 2 and not name.endswith("bias")


def is_hidden_matrix(name: str, num_dims: int) -> bool:
    """Return True if Muon orthogonalises the updates of a parameter: a matrix of a numbered layer, by torch's name.

    Embeddings, their projections and heads are outside of numbered layers. Experts are stacks of matrices; adapters of
    such stacks are not, as they have the ranks of all experts in one dimension.
    """
    of_experts = ".experts." in name
    is_matrix = num_dims == 2 and name.endswith("weight") and not (of_experts and "lora_" in name)
    is_stack = num_dims == 3 and of_experts
    return (is_matrix or is_stack) and decays(name, num_dims) and re.search(r"\.\d+\.", name) is not None


# Parameters before the layers, by transformers' names: embeddings and their own projections and norms. GPT-NeoX's head
# is named embed_out; the first name of RoBERTa's tied embedding is its head's.
_EMBEDDING = re.compile(r"embed(?!_out)|per_layer|\.(wte|wpe|w)\.|encoder\.(conv|LayerNorm)\.|"
                        r"lm_head\.decoder\.weight")


def num_layers(names: Iterable[str]) -> int:
    """Return the number of layers of a model, by torch's names of all its parameters."""
    return max((int(match[1]) + 1 for name in names if (match := re.search(r"\.(\d+)\.", name))), default=0)


def depth(name: str, layers: int) -> int:
    """Return a parameter's depth in a model of `layers` layers: 0 embeddings, 1 first layer, layers + 1 the rest."""
    if match := re.search(r"\.(\d+)\.", name):
        return int(match[1]) + 1
    return 0 if _EMBEDDING.search(name) else layers + 1


@dataclass(frozen=True)
class Optimizer:
    """Update rule, learning rate and schedule.

    Args:
        name: Update rule. The 8-bit and paged ones are bitsandbytes' (torch only). `muon` updates the matrices of
            layers, and adamw the rest.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay, on matrices only: not on biases and norms.
        b_lr_ratio: LoRA+: learning rate of an adapter's B matrices, as a multiple of `lr`.
        layer_decay: Factor on the learning rate from each layer to the one below. See docs/techniques.md.
        ema_decay: Decay of a float32 moving average of the trained parameters, which evaluation, samples and the
            exported model use. See docs/techniques.md.
        betas: Decay rates of the moments.
        eps: Added to the denominator of the Adam update.
        momentum: Momentum of sgd.
        muon_momentum: Momentum of muon, a moving average of gradients.
        nesterov: Use Nesterov momentum in muon.
        ns_steps: Number of Newton-Schulz iterations per update of muon.
        ns_dtype: Type of these iterations; bfloat16 is faster on GPUs.
        adjust_lr: Factor of muon on `lr` for a matrix with A rows and B columns. match_rms_adamw: 0.2 sqrt(max(A, B)),
            original: sqrt(max(1, A / B)). See docs/techniques.md.
        schedule: Learning rate after warmup. `linear` and `cosine` fall to `min_lr_ratio`; `wsd` does so linearly, in
            the last `decay` of the run.
        warmup: Linear warmup from 0: number of optimiser steps (100) or fraction of the run (0.03).
        decay: Length of the final decay of `wsd`, given like `warmup`.
        min_lr_ratio: Final learning rate as a fraction of `lr`.
    """

    name: OptimizerName = "adamw"
    lr: float = 2e-4
    weight_decay: float = 0.0
    b_lr_ratio: float = 1.0
    layer_decay: float = 1.0
    ema_decay: float | None = None
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    momentum: float = 0.0
    muon_momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_dtype: Literal["float32", "bfloat16"] = "float32"
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup: int | float = 0
    decay: int | float = 0.2
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        check_set(self, "optimizer")
        require(self.lr >= 0, "optimizer.lr", self.lr, "zero or more")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "zero or more")
        require(0 < self.b_lr_ratio < math.inf, "optimizer.b_lr_ratio", self.b_lr_ratio, "more than 0")
        require(0 < self.layer_decay <= 1, "optimizer.layer_decay", self.layer_decay, "more than 0 and at most 1")
        require(self.ema_decay is None or 0 < self.ema_decay < 1, "optimizer.ema_decay", self.ema_decay,
                "null, or more than 0 and less than 1")
        *rest, last = (name for name, spec in OPTIMIZERS.items() if not spec.is_bitsandbytes)
        require(self.ema_decay is None or not self.spec.is_bitsandbytes, "optimizer.ema_decay", self.ema_decay,
                f"null with optimizer.name {self.name}: {', '.join(rest)} and {last} keep averages",
                "optimizer.name")
        require(len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas,
                "two numbers from 0 up to but not including 1")
        require(self.eps > 0, "optimizer.eps", self.eps, "more than 0")
        require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "from 0 up to but not including 1")
        require(0 <= self.muon_momentum < 1, "optimizer.muon_momentum", self.muon_momentum,
                "from 0 up to but not including 1")
        require(1 <= self.ns_steps < 100, "optimizer.ns_steps", self.ns_steps, "from 1 to 99")
        require(not self.spec.needs_momentum or self.momentum > 0, "optimizer.momentum", self.momentum,
                f"more than 0 for {self.name}, which has no plain form", "optimizer.name")
        require(0 <= self.min_lr_ratio <= 1, "optimizer.min_lr_ratio", self.min_lr_ratio, "from 0 to 1")
        for key in ("warmup", "decay"):
            value = getattr(self, key)
            is_integer = isinstance(value, int)
            require(value >= 0 and (is_integer or value <= 1), f"optimizer.{key}", value,
                    "an integer number of steps, or a fraction of the run from 0.0 to 1.0")

    @property
    def spec(self) -> OptimizerSpec:
        """Facts about the update rule."""
        return OPTIMIZERS[self.name]

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the update rule in torch; with muon, for parameters that adamw updates."""
        return {name: tuple(self.betas) if name == "betas" else getattr(self, name) for name in self.spec.options}

    @property
    def muon_options(self) -> dict[str, Any]:
        """Arguments of muon's update rule, by the names of torch.optim.Muon."""
        return {"momentum": self.muon_momentum, "nesterov": self.nesterov, "ns_steps": self.ns_steps}

    def muon_factor(self, num_rows: int, num_columns: int) -> float:
        """Return muon's factor on the learning rate of a matrix; match_rms_adamw is by Liu et al. 2025."""
        if self.adjust_lr == "original":
            return math.sqrt(max(1, num_rows / num_columns))
        return 0.2 * math.sqrt(max(num_rows, num_columns))

    def scales(self, layers: int) -> list[float]:
        """Return the learning-rate factors by `depth` in a model of `layers` layers; a single one if all are alike.

        With `layer_decay` d (Clark et al. 2020, Bao et al. 2022), the last of n layers has factor d, the first d^n and
        the embeddings d^(n + 1).
        """
        if self.layer_decay == 1:
            return [1.0]
        return [self.layer_decay**(layers + 1 - level) for level in range(layers + 2)]

    def group_of(self, name: str, num_dims: int, layers: int = 0) -> int:
        """Return the index of a parameter's group in `groups`, by torch's name of the parameter."""
        group = 4
        if decays(name, num_dims):
            is_b = self.b_lr_ratio != 1 and ".lora_B." in name
            group = is_b + (0 if self.spec.has_matrix_rule and is_hidden_matrix(name, num_dims) else 2)
        return group if self.layer_decay == 1 else group * (layers + 2) + depth(name, layers)

    def groups(self, layers: int = 0) -> list[dict[str, float]]:
        """Return the settings of torch's parameter groups, in order.

        First muon's matrices, then other matrices, each without and with `b_lr_ratio`, then parameters without weight
        decay; each of these five has a group for every factor of `scales`. torch omits groups without parameters.

        Args:
            layers: Number of layers of the model, for `layer_decay`.
        """
        ratios = (1.0, self.b_lr_ratio)
        ratios_and_decays = [*((ratio, self.weight_decay) for ratio in (*ratios, *ratios)), (1.0, 0.0)]
        return [{"lr": self.lr * ratio * scale, "weight_decay": decay} for ratio, decay in ratios_and_decays
                for scale in self.scales(layers)]

    def is_of_muon(self, index: int, layers: int = 0) -> bool:
        """Return True if the group at this index in `groups` has muon's matrices."""
        return index < 2 * len(self.scales(layers))

    def lr_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of optimiser step `step` (0 for the first) in a run of `num_steps` steps.

        Warmup raises the rate linearly and reaches `lr` at step `warmup`. A falling schedule would reach
        `min_lr_ratio * lr` one step after the last, as in transformers' schedules.
        """
        warmup = _as_steps(self.warmup, num_steps)
        if step < warmup:
            return self.lr * step / warmup
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * self._height(step, warmup, num_steps))

    def _height(self, step: int, warmup: int, num_steps: int) -> float:
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "wsd":
            warmup = max(warmup, num_steps - _as_steps(self.decay, num_steps))
        progress = min(max((step - warmup) / max(num_steps - warmup, 1), 0.0), 1.0)
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1 - progress


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (Hu et al. 2021) on a frozen base, with PEFT's meaning of each field.

    DoRA is by Liu et al. 2024, rank-stabilised scaling by Kalajdzievski 2023, PiSSA by Meng et al. 2024.

    Args:
        rank: Rank of the update.
        alpha: Scales the update by alpha / rank, or by alpha / sqrt(rank) with `rslora`.
        dropout: Dropout on the adapter's input.
        targets: `all-linear` (all linear layers except the output head, experts and routers) or module names, matched
            at their end.
        target_parameters: Stacked expert matrices that get an adapter for each expert, in addition to `targets`,
            matched at the end of their names: `[experts.gate_up_proj, experts.down_proj]`.
        modules_to_save: Modules to train fully and save with the adapter, for example `[lm_head, embed_tokens]`.
        dora: Weight-decomposed adapters (DoRA).
        rslora: Rank-stabilised scaling.
        init: `kaiming` samples A and sets B to zero; `pissa` starts from the principal singular vectors of each matrix.
            See docs/techniques.md.
    """

    rank: int = 64
    alpha: float = 16.0
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    dora: bool = False
    rslora: bool = False
    init: Literal["kaiming", "pissa"] = "kaiming"

    def __post_init__(self) -> None:
        check_set(self, "lora")
        require(self.rank >= 1, "lora.rank", self.rank, "1 or more")
        require(self.alpha > 0, "lora.alpha", self.alpha, "more than 0")
        require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "from 0 up to but not including 1")
        if self.target_parameters:
            require(self.dropout == 0, "lora.dropout", self.dropout, "0 with lora.target_parameters, as in PEFT",
                    "lora.target_parameters")
            require(not self.dora, "lora.dora", self.dora, "false with lora.target_parameters, as in PEFT",
                    "lora.target_parameters")
            require(not self.is_principal, "lora.init", self.init, "kaiming with lora.target_parameters, as in "
                    "PEFT", "lora.target_parameters")
        require(not (self.dora and self.is_principal), "lora.init", self.init, "kaiming with lora.dora",
                "lora.dora")

    @property
    def scaling(self) -> float:
        """Factor on the low-rank update."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def is_principal(self) -> bool:
        """True if adapters start as the principal part of the base, which keeps the residual (`core.principal`)."""
        return self.init == "pissa"

    def for_export(self) -> "LoRA":
        """Return the settings of the adapter of rank 2 r that a principal one is exported as, with the same scaling."""
        alpha = self.alpha * (math.sqrt(2) if self.rslora else 2)
        return replace(self, rank=2 * self.rank, alpha=alpha, init="kaiming")


LEAST = -1e4  # log-probability of an impossible token, so that differences of two are finite
NOTHING = -1e9  # log-probability of a token that is omitted from a sum


class Divergence(NamedTuple):
    """Generalised Jensen-Shannon divergence of a student's distribution S from a teacher's T (Agarwal et al. 2024).

    With the mixture M = beta T + (1 - beta) S it is beta KL(T || M) + (1 - beta) KL(S || M); KL(T || S) for beta 0, and
    KL(S || T) for beta 1.

    Args:
        beta: beta.
        temperature: Divides the logits of both.
        ratio: Fraction of the divergence in the loss; the rest is the cross-entropy's.
        on_policy: True if the student sampled some tokens; the divergence is their only loss.
    """

    beta: float = 0.0
    temperature: float = 1.0
    ratio: float = 0.5
    on_policy: bool = False

    @property
    def evaluated(self) -> "Divergence":
        """The divergence in evaluation, which is measured but not part of the loss."""
        return self._replace(ratio=0.0, on_policy=False)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of training metrics: the parts of the loss, and the fraction of tokens that the student sampled."""
        return ("divergence", "cross_entropy", *(("drawn",) if self.on_policy else ()))


class TokenLoss(NamedTuple):
    """Changes to the cross-entropy of tokens in training.

    A token's loss is w (log Z - (1 - s) x_target - s mean(x)) + z (log Z)^2, with logits x and Z = sum exp(x). The
    weight w is 1, or with `dft` the token's probability exp(x_target) / Z, which has no gradient.

    Args:
        label_smoothing: s (Szegedy et al. 2016); 0 with `dft`.
        z_loss: z (Chowdhery et al. 2022).
        dft: Dynamic fine-tuning (Wu et al. 2025).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dft: bool = False


@dataclass(frozen=True)
class Teacher:
    """Knowledge distillation (Hinton et al. 2015) from a frozen teacher, in addition to the labels.

    Args:
        pretrained: Folder or hub id of the teacher, a model with the student's vocabulary.
        adapter: Folder of an adapter for the teacher.
        quantize: Store the teacher in 4 bits (nf4, fp4) or 8 bits (int8).
        beta: Divergence: 0 is the forward KL(teacher || student), 1 the reverse; values between mix them. See
            docs/distillation.md.
        temperature: Divides the logits of both in the divergence.
        ratio: The loss is ratio * divergence + (1 - ratio) * cross-entropy.
        top_k: Precompute the teacher's k most likely tokens for every target token and treat all others as one; the
            teacher then leaves memory.
        on_policy: Fraction of the rows whose answers the student samples in each epoch; these train on the divergence
            alone. SFT only.
        max_new_tokens: Maximum number of tokens in a sampled answer.
        sampling_temperature: Temperature of this sampling.
    """

    pretrained: str | None = None
    adapter: str | None = None
    quantize: Literal["nf4", "fp4", "int8"] | None = None
    beta: float = 0.0
    temperature: float = 1.0
    ratio: float = 0.5
    top_k: int | None = None
    on_policy: float = 0.0
    max_new_tokens: int = 128
    sampling_temperature: float = 0.9

    def __post_init__(self) -> None:
        check_set(self, "teacher")
        require(self.top_k is None or self.top_k >= 1, "teacher.top_k", self.top_k, "null, or 1 or more")
        # With another temperature, the probability of all other tokens together is unknown.
        require(self.top_k is None or self.temperature == 1, "teacher.temperature", self.temperature,
                "1 with teacher.top_k", "teacher.top_k")
        require(bool(self.pretrained), "teacher.pretrained", self.pretrained, "a folder or hub id of a model")
        require(0 <= self.beta <= 1, "teacher.beta", self.beta, "from 0 to 1")
        require(0 < self.temperature < math.inf, "teacher.temperature", self.temperature, "more than 0")
        require(0 < self.ratio <= 1, "teacher.ratio", self.ratio, "more than 0 and at most 1")
        require(0 <= self.on_policy <= 1, "teacher.on_policy", self.on_policy, "from 0 to 1")
        require(not self.on_policy or self.top_k is None, "teacher.top_k", self.top_k, "null with teacher.on_policy, "
                "whose answers are not known before training", "teacher.on_policy")
        require(self.max_new_tokens >= 1, "teacher.max_new_tokens", self.max_new_tokens, "1 or more")
        require(0 < self.sampling_temperature < math.inf, "teacher.sampling_temperature", self.sampling_temperature,
                "more than 0")
        for name, default in (("max_new_tokens", 128), ("sampling_temperature", 0.9)):
            require(self.on_policy > 0 or getattr(self, name) == default, f"teacher.{name}", getattr(self, name),
                    f"{default}, its default, with teacher.on_policy 0, which samples no answers", "teacher.on_policy")

    @property
    def divergence(self) -> Divergence:
        """The divergence and its fraction of the loss."""
        return Divergence(self.beta, self.temperature, self.ratio, on_policy=self.on_policy > 0)


@dataclass(frozen=True)
class Generation:
    """Decoding settings of predict and samples, with the names and meanings of transformers' GenerationConfig.

    Diverse beam search is by Vijayakumar et al. 2018, contrastive search by Su et al. 2022, locally typical sampling by
    Meister et al. 2022.

    Args:
        max_new_tokens: Maximum number of tokens in an answer.
        min_new_tokens: Minimum number of tokens in an answer.
        do_sample: Sample instead of taking the most likely token.
        num_beams: Number of beams.
        num_beam_groups: Number of groups in diverse beam search.
        penalty_alpha: Degeneration penalty of contrastive search, used with top_k > 1. Torch only.
        use_cache: Cache the keys and values of past tokens.
        temperature: Divides the logits before sampling.
        top_k: Sample from the k most likely tokens; 0 uses all.
        top_p: Sample from the most likely tokens whose probabilities sum to top_p.
        typical_p: Locally typical sampling: probability mass to sample from; 1 samples from all tokens.
        diversity_penalty: Penalty between the groups of diverse beam search.
        repetition_penalty: Penalty on tokens that occurred before; 1 is none.
        length_penalty: Exponent of the length in beam scores.
        no_repeat_ngram_size: Size of n-grams that may occur only once; 0 allows all.
    """

    max_new_tokens: int = 256
    min_new_tokens: int | None = None
    do_sample: bool = False
    num_beams: int = 1
    num_beam_groups: int = 1
    penalty_alpha: float | None = None
    use_cache: bool = True
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    typical_p: float = 1.0
    diversity_penalty: float = 0.0
    repetition_penalty: float = 1.0
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        check_set(self, "generation")
        require(self.max_new_tokens >= 1, "generation.max_new_tokens", self.max_new_tokens, "1 or more")
        require(self.num_beams >= 1, "generation.num_beams", self.num_beams, "1 or more")
        require(self.temperature > 0, "generation.temperature", self.temperature,
                "more than 0 (for greedy search set generation.do_sample to false)")
        for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("typical_p", 1.0)):
            require(self.do_sample or getattr(self, name) == neutral, f"generation.{name}", getattr(self, name),
                    f"{neutral} while generation.do_sample is false, as only sampling uses it",
                    "generation.do_sample")

    def check_positions(self, prompt_length: int, num_positions: int) -> None:
        """Raise UserError if prompt and answer together exceed a model's learned positions."""
        if prompt_length + self.max_new_tokens > num_positions:
            raise UserError(f"generation.max_new_tokens is {self.max_new_tokens}: with a prompt of {prompt_length} "
                            f"tokens, this exceeds the {num_positions} positions of this model. Lower it, or "
                            "data.max_length.")


@dataclass(frozen=True)
class BestOf:
    """Let predict sample several answers per prompt and keep the one that a reward model scores highest.

    Args:
        reward: Reward model: a finished Reward run, a sequence classification model with one label (folder or hub id),
            or the folder of an adapter for one.
        answers: Number of answers per prompt.
    """

    reward: str | None = None
    answers: int = 8

    def __post_init__(self) -> None:
        check_set(self, "best_of")
        require(bool(self.reward), "best_of.reward", self.reward, "a folder or hub id of a reward model")
        require(self.answers >= 2, "best_of.answers", self.answers, "2 or more")

    def check_method(self, generation: Generation) -> None:
        """Raise UserError unless a decoding method gives answers that differ."""
        if not generation.do_sample or generation.num_beams > 1:
            raise UserError("model.best_of needs sampled answers: set model.generation.do_sample to true and "
                            "model.generation.num_beams to 1, or model.best_of to null",
                            "model.best_of", "model.generation.do_sample", "model.generation.num_beams")


def check_beam_groups(num_beams: int, num_beam_groups: int, diversity_penalty: float, do_sample: bool | None) -> None:
    """Raise UserError unless beam search works with these groups."""
    if num_beam_groups <= 1:
        return
    if num_beams % num_beam_groups:
        raise UserError(f"num_beam_groups {num_beam_groups} must divide num_beams {num_beams}: change one of them")
    if do_sample:
        raise UserError("num_beam_groups cannot be combined with do_sample: set do_sample to false, or "
                        "num_beam_groups to 1")
    if diversity_penalty <= 0:
        raise UserError(f"diversity_penalty is {diversity_penalty}, but num_beam_groups {num_beam_groups} needs it "
                        "above 0: try 1.0")


def require(holds: bool, key: str, value: object, expected: str, *others: str) -> None:
    """Raise a UserError that names key, value and remedy, unless the condition holds (or keep it: `gathering`).

    Args:
        others: Other keys that the condition depends on.
    """
    if not holds:
        refuse_value(f"{key} is {as_yaml_word(value)}, but must be {expected}.", key, *others)


def as_yaml_word(value: object) -> object:
    """Return null, true or false as YAML writes them; any other value unchanged."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else value


def check_set(settings: Any, block: str) -> None:
    """Raise UserError if a field of a dataclass is None, but neither its default nor its type includes None.

    Args:
        block: Block of the recipe whose keys are the fields.
    """
    for item in fields(settings):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        takes_null = default is None or default is MISSING or type(None) in get_args(item.type)
        require(takes_null or getattr(settings, item.name) is not None, f"{block}.{item.name}", "null",
                f"set. Remove the key for its default, {default!r}")


def _as_steps(length: int | float, num_steps: int) -> int:
    return length if isinstance(length, int) else math.ceil(length * num_steps)
