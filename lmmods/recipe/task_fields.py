"""The fields of the tasks, which `model` of a recipe sets on either engine: types, defaults, documentation, checks.

Both engines' base classes inherit these dataclasses, so a new key is written here alone. What one of the engines does
not take it refuses by name when the run starts.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lmmods.core.errors import UserError
from lmmods.core.experts import check_overrides
from lmmods.core.hf_config import dropout_rates, known_fields, load_config, position_limit
from lmmods.core.preference_losses import GAMMA, PreferenceLoss
from lmmods.core.settings import Generation, LoRA, Optimizer, check_set, require

Quantize = Literal["nf4", "fp4", "int8"]


# As a network in training, a task is equal to itself alone and has a text of its own.
@dataclass(kw_only=True, eq=False, repr=False)
class TaskFields:
    """What every task takes.

    Args:
        pretrained: Model to start from: a folder or a hub id.
        config: Start from random weights instead: `{model_type: llama, hidden_size: 256, ...}`, or the folder or hub id
            of a configuration. The vocabulary size defaults to the tokenizer's.
        config_overrides: Fields changed in the configuration that `config` or `pretrained` names.
        revision: Branch, tag or commit of a hub model.
        trust_remote_code: Run Python code that comes with the model (torch engine only).
        quantize: Store the frozen base in 4 bits (nf4, fp4; experts too) or 8 (int8); needs `lora` or `adapter`. QLoRA
            (Dettmers et al. 2023) is `lora` plus this field.
        double_quant: Quantise the 4-bit scales too.
        quant_storage: Type in which packed 4-bit weights are kept (torch engine; changes nothing on JAX); null is
            uint8.
        lora: Train an adapter instead of the model itself; null is full tuning.
        adapter: Folder of an adapter to go on from, with its own rank, alpha and targets; instead of `lora`.
        optimizer: Update rule and schedule.
        gradient_checkpointing: Recompute activations in the backward pass: all of them (true: least memory, about a
            third more time), or all but the products of weights (minimal; JAX engine only).
        attention: Attention implementation of transformers (sdpa, eager, flash_attention_2); null takes its choice. On
            JAX null and sdpa are the fast forms, fused on GPUs and in blocks on CPUs, and eager is the plain one.
        save_dtype: Type of the weights in model/; null keeps them as they trained.
        piece_tokens: A micro-batch is computed in pieces of so many tokens, rows of similar length together; 0 computes
            it whole. null is 2^18 / hidden size (at least 512) on one CPU and 0 elsewhere. Torch engine only.
        fast_kernels: Take faster forms of the same function where there are some: logits of labelled positions only, a
            chunk at a time; oneDNN for float32 products on CPUs (after a trial), short rows attending in float32 under
            bfloat16 there, fused GELU, adapters computed with their layers, and on GPUs attention that knows packed
            rows. False needs the memory of all logits; on JAX it also takes eager attention and, on a CPU, a loop over
            layers.
        compile: Compile the layers (torch.compile): slower to start, faster on GPUs. JAX compiles everything anyhow.
        max_memory: Spread `pretrained` over the GPUs of this machine, layer by layer in one process: memory of its
            weights on each (20GiB), or by device ({0: 10GiB, 1: 20GiB}). Torch engine only.
    """

    takes: ClassVar[str | None] = None  # kind of the data that the loss is made for; None leaves it to the user
    answers: ClassVar[Literal["pair", "single", "mismatched"]] = "pair"  # what a row of preferences is to the loss
    sequences_per_row: ClassVar[int] = 1
    adapter_drops: ClassVar[bool] = True  # whether `adapter` keeps its own dropout

    pretrained: str | None = None
    config: str | dict[str, Any] | None = None
    config_overrides: dict[str, Any] | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    quantize: Quantize | None = None
    double_quant: bool = True
    quant_storage: Literal["uint8", "float32", "bfloat16", "float16"] | None = None
    lora: LoRA | None = None
    adapter: str | None = None
    optimizer: Optimizer = Optimizer()
    gradient_checkpointing: bool | Literal["minimal"] = False
    attention: str | None = None
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    piece_tokens: int | None = None
    fast_kernels: bool = True
    compile: bool = False
    max_memory: str | dict[int | str, str] | None = None

    def __post_init__(self) -> None:
        """Raise UserError unless the fields say clearly what the model starts from and what of it trains."""
        check_set(self, "model")
        require(self.max_memory is None or self.config is None, "model.max_memory", self.max_memory,
                "null beside model.config")
        require(self.piece_tokens is None or self.piece_tokens >= 0, "model.piece_tokens", self.piece_tokens,
                "0 or more")
        if self.quantize and not self.trains_adapter:
            raise UserError(f"model.quantize is {self.quantize}, but quantised weights cannot be trained themselves: "
                            "set model.lora (QLoRA), or model.quantize to null for full tuning.")
        if (self.config is None) == (self.pretrained is None):
            raise UserError("model.pretrained and model.config: set one of them, a model to start from or a "
                            "configuration to start from random weights.")
        if self.config is not None and self.trains_adapter:
            raise UserError("model.config starts from random weights, which an adapter does not hold: set model.lora "
                            "and model.adapter to null, or name a model in model.pretrained.")
        check_overrides({**(self.config if isinstance(self.config, dict) else {}), **(self.config_overrides or {})})
        if self.lora and self.adapter:
            raise UserError("model.lora and model.adapter are both set: the adapter brings its own rank, alpha and "
                            "targets. Keep one of them.")

    def check_data(self, data: Any) -> None:
        """Raise UserError where a data module says that it is of another task.

        Args:
            data: Fields of data, whose `kind` is the name of the class that a task `takes`.
        """
        if self.takes is not None and data.kind not in (None, self.takes):
            raise UserError(f"model.class_path is {type(self).__name__}, which trains on {self.takes}, but "
                            f"data.class_path is {type(data).__name__}: set it to {self.takes}, or model.class_path to "
                            f"{data.kind.removesuffix('Data')}.")

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter trains instead of the model itself."""
        return self.lora is not None or self.adapter is not None

    @property
    def overrides(self) -> dict[str, Any] | None:
        """Fields changed in the configuration, by the recipe or by the task."""
        return self.config_overrides

    def max_positions(self) -> int | None:
        """Longest row the model takes, where its configuration says so. Raises UserError for an unknown model."""
        return position_limit(self.config_fields())

    def config_fields(self) -> dict[str, Any]:
        """`hf_config.FIELDS` of the configuration, as far as set. Raises UserError for an unknown model."""
        return known_fields(load_config(self.pretrained or self.config, self.config_overrides, self.revision,
                                        self.trust_remote_code))


@dataclass(kw_only=True, eq=False, repr=False)
class CausalFields(TaskFields):
    """What causal LMs take beside that.

    Args:
        generation: How predict generates.
        balance_loss: Weight of a loss that spreads the tokens of each row evenly over the experts of a model that has
            some, in place of transformers' router_aux_loss_coef; 0 is none.
    """

    generation: Generation = Generation()
    balance_loss: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.balance_loss >= 0, "model.balance_loss", self.balance_loss, "0 or more")


class SFTFields(CausalFields):
    """What supervised fine-tuning takes."""

    takes = "SFTData"


class CLMFields(CausalFields):
    """What causal language modelling takes."""

    takes = "CLMData"


class QAFields(TaskFields):
    """What question answering takes."""

    takes = "QAData"


@dataclass(kw_only=True, eq=False, repr=False)
class MLMFields(TaskFields):
    """What masked LMs take beside that.

    Args:
        top_k: Candidates that predict names for each gap.
    """

    takes: ClassVar[str] = "MLMData"

    top_k: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.top_k >= 1, "model.top_k", self.top_k, "1 or more")
        require(self.max_memory is None, "model.max_memory", self.max_memory, "null for masked LMs")


@dataclass(kw_only=True, eq=False, repr=False)
class PreferenceFields(CausalFields):
    """What preference optimisation takes beside that.

    Args:
        loss: Loss of a pair: sigmoid (DPO), robust, hinge, ipo, sigmoid_norm, nca_pair, bco_pair, sppo_hard, apo_zero,
            apo_down, exo_pair, and without a reference simpo, orpo, cpo; of single answers with a label: kto,
            apo_zero_unpaired.
        beta: How much a change of log-probability counts; for ipo the weight of staying near the reference, for orpo
            that of the odds ratio.
        label_smoothing: Share of pairs whose answers are taken to be the wrong way round (sigmoid, robust,
            sigmoid_norm, exo_pair, simpo, cpo).
        gamma: Margin that simpo asks for between the answers.
        sft_weight: Weight of the chosen answer's negative log-likelihood per token, pair by pair; null is 1 for orpo
            and cpo, as their papers have it, and 0 for others.
        desirable_weight: Weight of wanted answers (kto, apo_zero_unpaired).
        undesirable_weight: Weight of unwanted ones.
        reference: What answers are compared with. `base` is the network without its adapter; `copy` is a frozen copy of
            what trains, as it stands before the first step; `cache` is the same network, of which only the
            log-probabilities of all answers are kept, computed once for all runs that share them. null is none for a
            loss without one, else `base` with `lora` and `copy` without.
    """

    takes: ClassVar[str] = "PreferenceData"
    adapter_drops: ClassVar[bool] = False

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = GAMMA
    sft_weight: float | None = None
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference: Literal["base", "copy", "cache"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        method = self.preference_loss.method
        require(method.has_reference or self.reference is None, "model.reference", self.reference,
                f"null with the loss {self.loss}, which compares with none")
        require(self.reference != "base" or self.trains_adapter, "model.reference", self.reference,
                "copy or cache (or null) without an adapter")
        require(self.max_memory is None, "model.max_memory", self.max_memory, "null for preference optimisation")
        require(not self.balance_loss, "model.balance_loss", self.balance_loss, "0 for preference optimisation")

    @property
    def overrides(self) -> dict[str, Any]:
        """Fields changed in the configuration: no dropout, which a reference has not, unless the recipe names a rate.

        Of the recipe's own fields none is changed. Raises UserError for an unknown model.
        """
        given = self.config_overrides or {}
        named = {*given, *(self.config if isinstance(self.config, dict) else {})}
        config = load_config(self.pretrained or self.config, given, self.revision, self.trust_remote_code)
        return {**{name: 0.0 for name in dropout_rates(config) if name not in named}, **given}

    @property
    def preference_loss(self) -> PreferenceLoss:
        """The loss with its settings. Raises UserError where they do not go together."""
        return PreferenceLoss(self.loss, self.beta, self.label_smoothing, self.gamma, self.sft_weight,
                              self.desirable_weight, self.undesirable_weight)

    @property
    def answers(self) -> Literal["pair", "single", "mismatched"]:  # type: ignore[override]
        """What a row of preferences is to the loss."""
        method = self.preference_loss.method
        return "pair" if method.is_paired else "mismatched" if method.has_baseline else "single"

    @property
    def sequences_per_row(self) -> int:  # type: ignore[override]
        """How many sequences of a batch a row is."""
        return 1 if self.answers == "single" else 2

    @property
    def reference_kind(self) -> Literal["base", "copy", "cache"] | None:
        """`reference`, with what null means."""
        if not self.preference_loss.method.has_reference:
            return None
        return self.reference or ("base" if self.lora else "copy")
