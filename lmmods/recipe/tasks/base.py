"""Fields that tasks share: types, defaults, documentation, and the checks that need neither data nor a library.

Both engines' task classes and the data modules inherit these dataclasses, so a key is written once. An engine reports
what it does not support when a run starts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from lmmods.core.errors import UserError, refuse_value
from lmmods.core.experts import check_overrides
from lmmods.core.freezing import check_patterns
from lmmods.core.hf_config import dropout_rates, known_fields, load_config, position_limit, tells_token_types
from lmmods.core.markdown import code
from lmmods.core.settings import BestOf, Divergence, Generation, LoRA, Optimizer, Teacher, TokenLoss, check_set, require
from lmmods.recipe.mixing import Mixing
from lmmods.recipe.source import SourceLike, as_sources

Quantize = Literal["nf4", "fp4", "int8"]
Scorer = Callable[[list[Any]], Sequence[float | None]]  # a reward model: texts or conversations -> scores
ReadScorer = Callable[[str, str], Scorer]

MAX_COUNT = 2**31 - 1  # array libraries count rows and tokens in 32 bits
# Maximum tokens of a micro-batch. At a width of 768, the inputs of one layer alone would take 400 GB in 16 bits.
MAX_TOKENS = 2**28
TOKENIZER_OPTIONS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
TURN_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "scored")
RowsAre = Literal["conversations", "texts", "questions"]
Overflow = Literal["error", "skip", "truncate_turns", "truncate_prompt", "truncate", "truncate_ends"]


def check_range(**limits: tuple[int | float | None, int] | tuple[int | float | None, int, int]) -> None:
    """Raise UserError for a value of a data key that is too small or too large.

    Args:
        limits: By key, its value (None is unset), the minimum and optionally the maximum.
    """
    for key, (value, minimum, *maximum) in limits.items():
        if value is not None and not value >= minimum:
            refuse_value(f"data.{key} is {value}, but must be {minimum} or more.", f"data.{key}")
        if value is not None and value > (maximum[0] if maximum else MAX_COUNT):
            refuse_value(f"data.{key} is {value}, but must be {maximum[0] if maximum else MAX_COUNT} or less.",
                         f"data.{key}")


@dataclass(frozen=True)
class Usual:
    """Usual settings of a task, from which `new` creates a recipe.

    Args:
        epochs: Number of epochs.
        rows: Number of rows per optimiser step.
        lr: Learning rate of full fine-tuning.
        small_lr: Like `lr`, for models with fewer than 50 million parameters.
        adapter_lr: Learning rate of an adapter.
        prompt: Prompt for `samples`; None for a task that does not generate text.
    """

    epochs: int = 3
    rows: int = 16
    lr: float = 2e-5
    small_lr: float = 2e-4
    adapter_lr: float = 2e-4
    prompt: str | None = None


class SamplingLoad(NamedTuple):
    """Number and length of the answers that training samples from the model.

    Args:
        answers: Number of answers.
        at_once: Number of answers sampled together.
        steps: Number of optimiser steps that train on them.
        new_tokens: Maximum number of tokens in an answer.
    """

    answers: int
    at_once: int
    steps: int
    new_tokens: int


# Tasks are networks in training, with their own equality and repr.
@dataclass(kw_only=True, eq=False, repr=False)
class TaskFields:
    """Fields of every task.

    Args:
        pretrained: Model to start from: folder or hub id.
        config: Start from random weights instead: `{model_type: llama, hidden_size: 256, ...}`, or the folder or hub id
            of a configuration. The vocabulary size defaults to the tokenizer's.
        config_overrides: Fields to change in the configuration of `config` or `pretrained`.
        revision: Branch, tag or commit of a hub model.
        trust_remote_code: Run Python code that comes with the model. Command line and torch only: see
            docs/extending.md.
        quantize: Store the frozen base in 4 bits (nf4, fp4; experts too) or 8 bits (int8). Needs `lora` (QLoRA) or
            `adapter`.
        double_quant: Quantise the 4-bit scales too.
        quant_storage: Storage type of packed 4-bit weights (no effect on JAX). Default: uint8.
        lora: Train an adapter instead of the model. null is full fine-tuning.
        adapter: Folder of an adapter to train further, instead of `lora`.
        trainable_parameters: Train only the parameters that match one of these regular expressions, anywhere in their
            Hugging Face name: `['layers\\.(6|7)\\.', lm_head]`. See docs/techniques.md.
        frozen_parameters: Do not train parameters that match one of these regular expressions, even if
            `trainable_parameters` does: `[embed_tokens]`.
        optimizer: Optimiser and learning-rate schedule.
        neftune_alpha: NEFTune: scale of the uniform noise that training adds to token embeddings. The paper uses 5 to
            15. See docs/techniques.md.
        gradient_checkpointing: Recompute activations in the backward pass: least memory, about a third more time.
            `offload` also keeps the layers' inputs in the host's memory and computes MLPs in chunks, for rows of 50,000
            tokens and more. `minimal` keeps the products with weights (JAX only).
        attention: Attention implementation of transformers: sdpa, eager or flash_attention_2. Default: transformers'
            choice; for JAX see docs/jax.md.
        save_dtype: Type of the weights in model/. Default: the type they trained in.
        piece_tokens: Split a micro-batch into chunks of this many tokens; 0 does not split. Default: on CPUs 2^18 /
            hidden size, at least 1024 (on JAX only with adapters, on one device); otherwise 0.
        fast_kernels: Use faster forms of the same functions, for output head, attention, adapters and more. false needs
            memory for all logits.
        compile: Compile the layers with torch.compile: slower to start, faster on GPUs. JAX always compiles.
        max_memory: Spread the layers of `pretrained` over this machine's GPUs: memory for weights on each (20GiB), or
            by device ({0: 10GiB, 1: 20GiB}). Torch only: see docs/cluster.md.
    """

    takes: ClassVar[str | None] = None  # `kind` of the data that the loss is for; None accepts any
    adapter_has_dropout: ClassVar[bool] = True  # True if `adapter` keeps its dropout
    auto_class: ClassVar[str] = "AutoModel"  # transformers' class that loads the model
    pipeline_tag: ClassVar[str | None] = None  # the hub's name of the task
    trains_full_head: ClassVar[bool] = False  # True if a new head, not over the vocabulary, trains next to an adapter
    own_files: ClassVar[tuple[str, ...]] = ()  # files in the run folder that only this task writes
    own_folders: ClassVar[tuple[str, ...]] = ()  # like own_files, folders with files by step: step=50.jsonl
    # Keys of this class whose content identifies a run: folders or hub ids of models, configurations and adapters, and
    # the user's classes, whose fingerprint is in the data module's `identity`.
    model_keys: ClassVar[tuple[str, ...]] = ("pretrained", "config", "adapter")
    class_keys: ClassVar[tuple[str, ...]] = ()
    accuracy: ClassVar[str | None] = None  # metric that may still rise when val/loss no longer falls
    ranked_by: ClassVar[tuple[str, Literal["min", "max"]]] = ("val/loss", "min")  # default monitor of checkpoints
    loss_falls: ClassVar[bool] = True  # False if the loss does not measure how good the model is
    usual: ClassVar[Usual] = Usual()
    # Keys of this class that may change when a run resumes; a change of any other key would make it another run.
    may_change: ClassVar[tuple[str, ...]] = (
        "gradient_checkpointing", "attention", "save_dtype", "piece_tokens", "fast_kernels", "compile", "quant_storage",
        "max_memory", "trust_remote_code", "optimizer.lr", "optimizer.weight_decay", "optimizer.schedule",
        "optimizer.warmup", "optimizer.decay", "optimizer.min_lr_ratio")
    not_compared: ClassVar[tuple[str, ...]] = ()  # keys that do not change the network; `inspect --parity` skips them

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
    trainable_parameters: list[str] | None = None
    frozen_parameters: list[str] | None = None
    optimizer: Optimizer = Optimizer()
    neftune_alpha: float | None = None
    gradient_checkpointing: bool | Literal["minimal", "offload"] = False
    attention: str | None = None
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    piece_tokens: int | None = None
    fast_kernels: bool = True
    compile: bool = False
    max_memory: str | dict[int | str, str] | None = None

    def __post_init__(self) -> None:
        """Raise UserError unless the fields define what the model starts from and what trains."""
        check_set(self, "model")
        require(self.max_memory is None or self.config is None, "model.max_memory", self.max_memory,
                "null with model.config", "model.config")
        require(self.piece_tokens is None or self.piece_tokens >= 0, "model.piece_tokens", self.piece_tokens,
                "0 or more")
        if self.quantize and not self.trains_adapter:
            raise UserError(f"model.quantize is {self.quantize}, but quantised weights cannot be trained. Set "
                            "model.lora (QLoRA), or model.quantize to null for full fine-tuning.",
                            "model.quantize", "model.lora", "model.adapter")
        if (self.config is None) == (self.pretrained is None):
            raise UserError("model.pretrained and model.config: set one of them, to start from a model or from "
                            "random weights.", "model.pretrained", "model.config")
        if self.config is not None and self.trains_adapter:
            raise UserError("model.config starts from random weights, which an adapter does not contain. Set "
                            "model.lora and model.adapter to null, or use model.pretrained.", "model.config",
                            "model.lora", "model.adapter")
        check_overrides({**(self.config if isinstance(self.config, dict) else {}), **(self.config_overrides or {})})
        require(self.neftune_alpha is None or 0 < self.neftune_alpha < math.inf, "model.neftune_alpha",
                self.neftune_alpha, "null or more than 0")
        require(self.trains_adapter or self.optimizer.b_lr_ratio == 1, "model.optimizer.b_lr_ratio",
                self.optimizer.b_lr_ratio, "1 without model.lora or model.adapter", "model.lora", "model.adapter")
        for key in ("trainable_parameters", "frozen_parameters"):
            patterns = getattr(self, key)
            check_patterns(f"model.{key}", patterns)
            require(patterns is None or not self.trains_adapter, f"model.{key}", patterns,
                    "null with model.lora and model.adapter, with which only the adapter trains; set lora.targets "
                    "and lora.modules_to_save instead", "model.lora", "model.adapter")
        require(self.quantize != "int8" or self.starts_at_base, "model.quantize", self.quantize,
                "nf4, fp4 or null with lora.init: pissa", "model.lora.init")
        if self.lora and self.adapter:
            raise UserError("model.lora and model.adapter are both set: the adapter brings its own rank, alpha and "
                            "targets. Keep one of them.", "model.lora", "model.adapter")

    def check_data(self, data: "DataFields") -> None:
        """Raise UserError if a data module belongs to another task.

        Args:
            data: Fields of the data module; its `kind` is the class name that a task `takes`.
        """
        if self.takes is not None and data.kind not in (None, self.takes):
            task, data_module = (type(fields).__name__.removesuffix("Fields") for fields in (self, data))
            raise UserError(f"model.class_path is {task}, which trains on {self.takes}, but data.class_path is "
                            f"{data_module}. Set it to {self.takes}, or model.class_path to "
                            f"{data.trained_by or data.kind.removesuffix('Data')}.", "model.class_path",
                            "data.class_path")

    def drop_unused(self, command: str) -> None:
        """Unset fields that a command does not use. Default: none."""

    def data_facts(self, command: str, read_scorer: ReadScorer) -> dict[str, Any]:
        """Return the facts about the model that the data module needs, as arguments of its `connect`.

        Args:
            read_scorer: Reads a reward model, given its name and recipe key.

        Raises:
            UserError: The model or a reward model is unknown.
        """
        fields = self.config_fields()
        return {"pretrained": self.pretrained, "revision": self.revision, "trust_remote_code": self.trust_remote_code,
                "max_positions": position_limit(fields), "token_types": tells_token_types(fields),
                "answers": self.answers, "label_names": self.label_names(), "new_tokens": self.new_tokens}

    @classmethod
    def method(cls, settings: dict[str, Any]) -> tuple[list[str], str]:
        """Return the training method for the model card: the hub's tags and a sentence.

        Args:
            settings: `model.init_args` of the recipe.
        """
        return [], ""

    def describe_step(self, rows: int, tokens: float | None) -> tuple[str, str]:
        """Describe the rows of an optimiser step and their tokens, in a few words each.

        Args:
            tokens: Mean over the training rows, times `rows`; None if they have not been read.
        """
        return f"{rows} rows", "" if tokens is None else f"about {tokens:.0f} tokens"

    def describe_training(self, rows: int, num_rows: int | None) -> list[str]:
        """Describe training before its first step, in lines for the console.

        Args:
            rows: Rows of an optimiser step.
            num_rows: Rows of the training data; None if they have not been read.
        """
        return []

    def sampling_load(self, rows: int, eval_batch_size: int) -> SamplingLoad | None:
        """Return the answers that training samples; None if there are none, or a server samples them.

        Args:
            rows: Rows of an optimiser step.
        """
        return None

    @property
    def token_loss(self) -> TokenLoss:
        """Changes to the cross-entropy of tokens in training."""
        return TokenLoss()

    @property
    def divergence(self) -> Divergence | None:
        """Divergence from a teacher, which training mixes into the cross-entropy of tokens; None without a teacher."""
        return None

    @property
    def precomputes_teacher(self) -> bool:
        """True if a teacher's most likely tokens are computed before training (`teacher.top_k`)."""
        return False

    @property
    def answers(self) -> Literal["pair", "single", "mismatched"]:
        """How the loss treats a row of preferences."""
        return "pair"

    @property
    def reference_kind(self) -> Literal["base", "copy", "cache"] | None:
        """Type of the frozen reference model that training compares with; None without one."""
        return None

    @property
    def starts_at_base(self) -> bool:
        """False if the base without its adapter is not the model that training starts from: `lora.init` pissa."""
        return not (self.lora and self.lora.is_principal)

    @property
    def trains_adapter(self) -> bool:
        """True if an adapter trains instead of the model."""
        return self.lora is not None or self.adapter is not None

    @property
    def freezes(self) -> bool:
        """True if only a part of the parameters trains, without an adapter."""
        return self.trainable_parameters is not None or self.frozen_parameters is not None

    @property
    def new_tokens(self) -> int:
        """Maximum number of tokens in an answer, for which a prompt must leave space."""
        return 1

    @property
    def rows_per_prompt(self) -> int:
        """Number of training rows per prompt."""
        return 1

    @property
    def all_parts(self) -> bool:
        """True if all parts of a checkpoint are loaded, not only its text model."""
        return False

    @property
    def overrides(self) -> dict[str, Any] | None:
        """Fields changed in the configuration, by the recipe or by the task."""
        return self.config_overrides

    def _without_dropout(self) -> dict[str, Any]:
        """Return `config_overrides` and a rate of 0 for all dropout that the recipe does not set.

        Raises UserError for an unknown model.
        """
        overrides = self.config_overrides or {}
        explicit = {*overrides, *(self.config if isinstance(self.config, dict) else {})}
        config = load_config(self._pretrained_or_config, overrides, self.revision, self.trust_remote_code,
                             all_parts=self.all_parts)
        return {**{name: 0.0 for name in dropout_rates(config, self.all_parts) if name not in explicit}, **overrides}

    @property
    def _pretrained_or_config(self) -> str | dict[str, Any]:
        """Model or configuration that the network is built from."""
        start = self.pretrained or self.config
        assert start is not None, "checked by __post_init__"
        return start

    def max_positions(self) -> int | None:
        """Return the maximum sequence length in the configuration, if any. Raises UserError for an unknown model."""
        return position_limit(self.config_fields())

    def label_names(self) -> list[str] | None:
        """Return the label names of `pretrained`, in the order of its outputs; None if it has no names."""
        if self.pretrained is None:
            return None
        config = load_config(self.pretrained, self.config_overrides, self.revision, self.trust_remote_code,
                             all_parts=self.all_parts)
        names = [str(config.id2label[index]) for index in sorted(config.id2label)]
        return None if names == [f"LABEL_{index}" for index in range(len(names))] else names

    def config_fields(self) -> dict[str, Any]:
        """Return the configuration's values of `hf_config.FIELDS`, if set. Raises UserError for an unknown model."""
        return known_fields(load_config(self._pretrained_or_config, self.config_overrides, self.revision,
                                        self.trust_remote_code, all_parts=self.all_parts))


@dataclass(kw_only=True, eq=False, repr=False)
class TokenLossFields(TaskFields):
    """Fields of tasks with a cross-entropy over tokens.

    Args:
        label_smoothing: Fraction of each target that training spreads evenly over the vocabulary.
        z_loss: Weight of (log Z)^2 in the training loss of each token, which keeps logits near 0. See
            docs/techniques.md.
        teacher: Distil from a frozen model with the same vocabulary. null trains on the data alone.
    """

    model_keys: ClassVar[tuple[str, ...]] = ("teacher.pretrained", "teacher.adapter")

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.label_smoothing < 1, "model.label_smoothing", self.label_smoothing,
                "from 0 up to but not including 1")
        require(0 <= self.z_loss < math.inf, "model.z_loss", self.z_loss, "zero or more")
        require(self.teacher is None or self.max_memory is None, "model.max_memory", self.max_memory,
                "null with model.teacher", "model.teacher")
        require(self.teacher is None or self.teacher.ratio < 1 or not (self.label_smoothing or self.z_loss),
                "model.teacher.ratio", 1, "less than 1 with model.label_smoothing or model.z_loss, which change only "
                "the cross-entropy", "model.label_smoothing", "model.z_loss")

    @classmethod
    def method(cls, settings: dict[str, Any]) -> tuple[list[str], str]:
        teacher = settings.get("teacher")
        if not teacher:
            return [], ""
        fraction = teacher.get("on_policy")
        sampled = f", on {fraction:.0%} of the rows with its own answers" if fraction else ""
        return ["distillation"], f"Distilled from {code(str(teacher.get('pretrained')))}{sampled}."

    def drop_unused(self, command: str) -> None:
        if command == "predict":
            self.teacher = None

    @property
    def token_loss(self) -> TokenLoss:
        return TokenLoss(self.label_smoothing, self.z_loss)

    @property
    def divergence(self) -> Divergence | None:
        return None if self.teacher is None else self.teacher.divergence

    @property
    def precomputes_teacher(self) -> bool:
        return self.teacher is not None and self.teacher.top_k is not None

    @property
    def on_policy(self) -> float:
        """Fraction of the rows whose answers the student samples (`teacher.on_policy`)."""
        return 0.0 if self.teacher is None else self.teacher.on_policy

    def _refuse_on_policy(self, words: str) -> None:
        """Raise UserError if the recipe requests sampled answers; `words` name the task."""
        require(not self.on_policy, "model.teacher.on_policy", self.on_policy,
                f"0 for {words}: only SFT samples answers")

    @property
    def teacher_fields(self) -> TaskFields:
        """Fields of the teacher's network, which only runs forward."""
        assert self.teacher is not None
        fields = TaskFields(pretrained=self.teacher.pretrained, adapter=self.teacher.adapter, attention=self.attention,
                            trust_remote_code=self.trust_remote_code, fast_kernels=self.fast_kernels)
        fields.quantize = self.teacher.quantize  # set afterwards: a frozen model needs no adapter
        return fields


@dataclass(kw_only=True, eq=False, repr=False)
class CausalFields(TaskFields):
    """Fields of causal language models.

    Args:
        generation: Decoding settings of predict.
        cuda_graphs: On a GPU, start the kernels of a token at once, in greedy search and sampling: faster for small
            models and few rows. Not tried on a GPU yet. Torch only: see docs/techniques.md.
        best_of: Generate several answers per prompt in predict and let a reward model choose. null generates one.
        balance_loss: Weight of a loss that spreads the tokens of each row evenly over a model's experts. See
            docs/metrics.md.
    """

    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    pipeline_tag: ClassVar[str] = "text-generation"
    may_change: ClassVar[tuple[str, ...]] = ("generation", "cuda_graphs", "best_of")

    generation: Generation = Generation()
    cuda_graphs: bool = False
    best_of: BestOf | None = None
    balance_loss: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.balance_loss >= 0, "model.balance_loss", self.balance_loss, "0 or more")
        if self.best_of is not None:
            self.best_of.check_method(self.generation)

    def data_facts(self, command: str, read_scorer: ReadScorer) -> dict[str, Any]:
        facts = {**super().data_facts(command, read_scorer), "max_new_tokens": self.generation.max_new_tokens}
        if self.best_of is not None and command == "predict":
            facts["reward_model"] = read_scorer(self.best_of.reward or "", "model.best_of.reward")
        return facts

    @property
    def num_answers(self) -> int:
        """Number of answers per prompt in predict."""
        return self.best_of.answers if self.best_of is not None else 1


@dataclass(kw_only=True, eq=False, repr=False)
class LabelFields(TaskFields):
    """Fields of tasks that learn labels.

    Args:
        class_weights: Weight of each label in the loss, by name ({rare: 5.0}; others weigh 1), or `balanced`: rows /
            (labels * rows with the label).
    """

    # Encoders of any size are tuned at 2e-5 to 5e-5 (Devlin et al., 2019, appendix A.3).
    usual: ClassVar[Usual] = Usual(rows=32, lr=2e-5, small_lr=5e-5)
    own_files: ClassVar[tuple[str, ...]] = ("classes.json",)
    trains_full_head: ClassVar[bool] = True

    class_weights: dict[str, float] | Literal["balanced"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, weight in self.class_weights.items() if isinstance(self.class_weights, dict) else ():
            require(weight > 0 and math.isfinite(weight), f"model.class_weights.{name}", weight, "more than 0")

    @classmethod
    def method(cls, settings: dict[str, Any]) -> tuple[list[str], str]:
        return [], "Trained with class weights." if settings.get("class_weights") else ""


@dataclass(kw_only=True, eq=False, repr=False)
class DataFields:
    """Fields of every data module.

    Args:
        source: Training rows: file, folder, glob, URL, hub id, a mapping {path, name, split, revision, columns, limit,
            weight, format}, or a list of these.
        val_source: Validation rows, given like `source`.
        val_size: Usable rows of `source` to hold out for validation, chosen by `seed`: fraction (0.05) or number (200).
        test_source: Test rows, given like `source`.
        predict_source: Rows for predict, given like `source`. Default: the test set, otherwise the validation set.
        mixing: Share of each source in training batches. See docs/data.md.
        deduplicate: Drop training rows that repeat an earlier one: `exact` compares prompt and answer, `minhash` also
            finds nearly equal text. See docs/data.md.
        minhash_threshold: With `minhash`, fraction of common word 5-grams from which rows count as nearly equal.
        decontaminate: Evaluation sets. Rows of `source` that share a word n-gram with them are dropped. See
            docs/data.md.
        decontaminate_ngram: Number of words in these n-grams.
        tokenizer: Folder or hub id of the tokenizer. Default: the model's.
        pad_token: Padding token, existing or new. Default: the tokenizer's; if it has none, one is chosen and reported.
        bos_token: Token that starts a text, if the tokenizer defines none.
        eos_token: Token that ends a text, if the tokenizer defines none.
        add_tokens: Tokens to keep whole in texts; one that the chat template writes is kept whole only there. New ones
            extend the vocabulary and are trained, also next to an adapter.
        tokenizer_options: Options that the folder of a BERT tokenizer lacks or has wrong: do_lower_case, strip_accents,
            tokenize_chinese_chars. A folder with only vocab.txt is read in lower case.
        max_length: Maximum sequence length in tokens. Default: 1024, or the model's limit if that is lower.
        batch_size: Rows per micro-batch and device in training.
        eval_batch_size: Rows per batch and device outside training. Default: `batch_size`.
        packing: Pack several rows, isolated from each other, into one sequence of `max_length`.
        streaming: Encode rows during training instead of into the cache, for sources larger than the disk. Needs
            `trainer.max_steps` and, for validation, `val_source`.
        stream_window: Number of stream rows that are read and shuffled together.
        group_by_length: Batch rows of similar length, which saves padding.
        shuffle: Shuffle the training rows in each epoch.
        pad_to_multiple_of: Pad batches to a multiple of this length.
        num_workers: Number of processes that assemble training and validation batches. 0 uses the training process, as
            predict and rollouts do.
        num_proc: Number of processes that tokenise. Default: by the size of the source.
        columns: Column names in the file -> names that the task expects, for sources without their own `columns`.
        cache_dir: Folder of tokenised data. Default: $LMMODS_CACHE, otherwise lmmods in the user's cache folder.
        rebuild_cache: Tokenise again even if the data is cached.
        seed: Seed of splits and data order. Default: `seed_everything`.
    """

    kind: ClassVar[str | None] = None  # class name that a task `takes`; None works with any task
    trained_by: ClassVar[str | None] = None  # the task that takes it; None is `kind` without Data
    # How `new` chooses lengths: for conversations by the rows, for texts full blocks, for questions windows.
    rows_are: ClassVar[RowsAre] = "conversations"
    has_chats: ClassVar[bool] = False  # True if rows are conversations in a template
    generality: ClassVar[int] = 0  # `new` tries data with a lower value first
    may_change: ClassVar[tuple[str, ...]] = (  # as in TaskFields
        "val_source", "test_source", "predict_source", "eval_batch_size", "pad_to_multiple_of", "num_workers",
        "num_proc", "cache_dir", "rebuild_cache")

    source: SourceLike = field(kw_only=False)
    val_source: SourceLike | None = None
    val_size: int | float = 0.0
    test_source: SourceLike | None = None
    predict_source: SourceLike | None = None
    mixing: Mixing | None = None
    deduplicate: Literal["exact", "minhash"] | None = None
    minhash_threshold: float = 0.8
    decontaminate: SourceLike | None = None
    decontaminate_ngram: int = 13
    tokenizer: str | None = None
    pad_token: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    add_tokens: list[str] | None = None
    tokenizer_options: dict[str, bool] | None = None
    max_length: int | None = None
    batch_size: int = 1
    eval_batch_size: int | None = None
    packing: bool = False
    streaming: bool = False
    stream_window: int = 10_000
    group_by_length: bool = False
    shuffle: bool = True
    pad_to_multiple_of: int = 8
    num_workers: int = 0
    num_proc: int | None = None
    columns: dict[str, str] | None = None
    cache_dir: str | None = None
    rebuild_cache: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        check_set(self, "data")
        check_range(batch_size=(self.batch_size, 1), eval_batch_size=(self.eval_batch_size, 1),
                    max_length=(self.max_length, 2), pad_to_multiple_of=(self.pad_to_multiple_of, 1),
                    num_workers=(self.num_workers, 0, 1024), num_proc=(self.num_proc, 1, 1024),
                    val_size=(self.val_size, 0), stream_window=(self.stream_window, 1),
                    decontaminate_ngram=(self.decontaminate_ngram, 1, 1000))
        self.check_tokens()
        if unknown := set(self.tokenizer_options or {}).difference(TOKENIZER_OPTIONS):
            raise UserError(f"data.tokenizer_options has {', '.join(sorted(unknown))}, but takes only "
                            f"{', '.join(TOKENIZER_OPTIONS)}", "data.tokenizer_options")
        if "" in (self.add_tokens or []):
            raise UserError("data.add_tokens contains an empty string; remove it", "data.add_tokens")
        if self.val_size and self.val_source is not None:
            raise UserError("data.val_size and data.val_source are both set; keep one of them", "data.val_size",
                            "data.val_source")
        if self.val_size and self.streaming:
            raise UserError("data.val_size needs all rows and cannot be combined with data.streaming; set "
                            "data.val_source", "data.val_size", "data.streaming")
        require(0 < self.minhash_threshold <= 1, "data.minhash_threshold", self.minhash_threshold,
                "more than 0 and at most 1")
        require(self.deduplicate == "minhash" or self.minhash_threshold == 0.8, "data.minhash_threshold",
                self.minhash_threshold, "0.8, its default, unless data.deduplicate is minhash", "data.deduplicate")
        require(self.decontaminate is not None or self.decontaminate_ngram == 13, "data.decontaminate_ngram",
                self.decontaminate_ngram, "13, its default, unless data.decontaminate names evaluation sets",
                "data.decontaminate")
        if self.deduplicate is not None and self.streaming:
            raise UserError("data.deduplicate needs all rows and cannot be combined with data.streaming; set one of "
                            "them to null or false", "data.deduplicate", "data.streaming")
        if self.mixing is not None:
            self.mixing.check([source.weight for source in as_sources(self.source, "source")], self.streaming,
                              self.group_by_length)

    @property
    def mixes(self) -> bool:
        """True if the sources' shares are not their numbers of rows."""
        return self.mixing is not None and self.mixing.rule != "concat"

    def check_tokens(self) -> None:
        """Raise UserError if a micro-batch has more tokens than fit on any device; an unset length counts as 1."""
        length = self.max_length or 1
        for name in ("batch_size", "eval_batch_size"):
            rows = getattr(self, name) or 0
            if rows * length > MAX_TOKENS:
                max_rows = MAX_TOKENS // length
                raise UserError(f"data.{name} is {rows:,} and data.max_length {length:,}: {rows * length:,} tokens in "
                                f"a micro-batch, but no device fits more than {MAX_TOKENS:,}. Lower "
                                + (f"data.{name} to {max_rows:,} or less" if max_rows else "data.max_length")
                                + "; trainer.accumulate_grad_batches makes larger steps", f"data.{name}",
                                "data.max_length")


@dataclass(kw_only=True, eq=False, repr=False)
class TextDataFields(DataFields):
    """Fields of the tasks on plain text.

    Args:
        source: Training texts, in text files or files with a text column: file, folder, glob, URL, hub id, a mapping
            {path, name, split, revision, columns, limit, weight}, or a list of these.
        text_column: Column with the text.
        documents: What a document of a .txt file is: the whole `file`, each `paragraph` (separated by blank lines) or
            each `line`.
    """

    rows_are: ClassVar[RowsAre] = "texts"
    generality: ClassVar[int] = 1
    block: ClassVar[int] = 1024  # usual number of tokens in a row

    text_column: str = "text"
    documents: Literal["file", "paragraph", "line"] = "file"


@dataclass(kw_only=True, eq=False, repr=False)
class LabelDataFields(DataFields):
    """Fields of the tasks that learn labels.

    Args:
        labels: Label names, in the order of the model's outputs. Default: the training rows' labels, sorted or in the
            model's order. Required for streams.
    """

    labels: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise UserError("data.packing is not supported for tasks with labels, which read each row separately; use "
                            "data.group_by_length to save most of the padding", "data.packing")
        if self.labels is not None:
            duplicate = next((name for name in self.labels if self.labels.count(name) > 1), None)
            require(duplicate is None, "data.labels", self.labels, f"a list that names {duplicate!r} once")
            require(bool(self.labels), "data.labels", self.labels, "null or a list of names")


@dataclass(kw_only=True, eq=False, repr=False)
class ConversationFields(DataFields):
    """Fields of the tasks on conversations.

    Args:
        source: Training rows: file, folder, glob, URL, hub id, a qlora dataset by name, a mapping {path, name, split,
            revision, columns, limit, weight, format}, or a list of these.
        template: Chat template: alpaca, chatml, llama2, llama3, mistral, gemma, vicuna, zephyr, plain, qlora-alpaca,
            qlora-plain, or a Jinja file (.jinja). Default: the tokenizer's, otherwise alpaca.
        chat_template_kwargs: Variables of the chat template, for example {enable_thinking: false}. A row's own
            chat_template_kwargs take precedence.
        dataset_format: Layout of the conversations (alpaca, messages, prompt-completion, ...). Default: detected from
            the columns.
        roles: Role names in the file -> system, user, assistant or tool, in addition to the usual names.
        turn_fields: Parts of a turn (role, content, reasoning_content, tool_calls, tool_call_id, name, scored) -> their
            keys in the file, in addition to the usual keys: {role: who, content: said}.
        reasoning: Keep or drop reasoning (`reasoning_content`, or `<think>` in a response).
        system_prompt: System turn for conversations without one.
        replace_system_prompt: Use `system_prompt` in all conversations, instead of their own system turns.
        source_max_length: Maximum length of the prompt (everything before the last response) in tokens.
        target_max_length: Maximum length of the last response in tokens.
        on_overflow: What to do with a row over a limit. `error` stops; `skip` drops the row; `truncate_turns` drops the
            oldest exchanges, but not the system turn and the tools; `truncate_prompt` truncates the start of the
            prompt; `truncate` truncates the end of the response, with its end token, and the start of a prompt over
            `source_max_length`; `truncate_ends` truncates the ends of both. Default: `truncate_turns` with a Jinja chat
            template, otherwise `truncate_prompt`.
    """

    has_chats: ClassVar[bool] = True

    template: str | None = None
    dataset_format: str | None = None
    roles: dict[str, str] | None = None
    turn_fields: dict[str, str] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    reasoning: Literal["keep", "drop"] = "keep"
    system_prompt: str | None = None
    replace_system_prompt: bool = False
    source_max_length: int | None = None
    target_max_length: int | None = None
    on_overflow: Overflow | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(source_max_length=(self.source_max_length, 1), target_max_length=(self.target_max_length, 1))
        unknown = [name for name in self.turn_fields or {} if name not in TURN_FIELDS]
        if unknown:
            raise UserError(f"data.turn_fields: {unknown[0]!r} is not a part of a turn ({', '.join(TURN_FIELDS)}). Put "
                            "parts on the left, keys of the file on the right: {role: who, content: said}",
                            "data.turn_fields")
        if self.replace_system_prompt and self.system_prompt is None:
            raise UserError("data.replace_system_prompt is set, but data.system_prompt is not; set it too",
                            "data.replace_system_prompt", "data.system_prompt")
