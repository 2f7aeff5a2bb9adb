"""What every task on JAX shares: how a network is made, and what the compiled steps call."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_engine.distributed.loss import LossSums
from jax_engine.distributed.prefetch import Group
from jax_engine.distributed.steps import Steps
from jax_engine.distributed.tree import Tree, flatten, split, unflatten
from jax_engine.distributed.weights import Weights
from jax_engine.models import hub, loading
from jax_engine.models import lora as adapters
from jax_engine.models.architecture import Head
from jax_engine.models.network import Network
from jax_engine.models.quant import Quantized
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.hf_config import (
    check_saved_quantization,
    load_config,
    saved_quantization,
    special_ids,
    vocabulary_fields,
)
from lmmods.core.settings import quantised_in_full
from lmmods.core.task_fields import TaskFields

# Fields of which this engine takes some values only, and what to do about the others.
SUPPORTED = {
    "trust_remote_code": ((False,), "Use engine: torch."),
    "piece_tokens": ((None, 0), "Use engine: torch."),
    "attention": ((None, "sdpa", "eager"), "Use engine: torch."),
    "max_memory": ((None,), "Take it out: trainer.strategy: fsdp shards a model here."),
}
COMPUTE_DTYPES = {"32-true": "float32", "bf16-true": "bfloat16", "bf16-mixed": "bfloat16"}


class Task(TaskFields, ABC):
    """A network in training on JAX."""

    head: Head
    auto_class = "AutoModel"

    def __post_init__(self) -> None:
        for name, (supported, instead) in SUPPORTED.items():
            if (value := getattr(self, name)) not in supported:
                raise UserError(f"model.{name} is {value!r}, which the JAX engine does not support "
                                f"(it takes {', '.join(map(json.dumps, supported))}). {instead}")
        super().__post_init__()
        self.network: Network | None = None
        self._sums: list[dict[str, Array]] = []

    # The network -----------------------------------------------------------------------------------------------------

    def build(self, precision: str, datamodule: Any, seed: int) -> tuple[Tree, Tree]:
        """Make the network and its first parameters, as numpy arrays: those that train, and the others."""
        tokenizer = datamodule.tokenizer
        compute = COMPUTE_DTYPES[precision]
        config = load_config(self.pretrained or self.config, self.config_overrides, self.revision,
                             defaults=vocabulary_fields(tokenizer, self.head == "causal"))
        config._attn_implementation = self.attention if self.fast_kernels else "eager"
        remat = {False: "none", True: "full"}.get(self.gradient_checkpointing, self.gradient_checkpointing)
        options: dict[str, Any] = {"compute_dtype": compute, "remat": remat, "fast_kernels": self.fast_kernels}
        check_saved_quantization(saved_quantization(config), self.pretrained, self.quantize, self.trains_adapter)
        bare = hub.network(config, self.head, **options)
        stored = compute if self.trains_adapter or precision == "bf16-true" else "float32"
        if self.pretrained:
            params = loading.load(bare, self.pretrained, self.revision, stored, seed, self.quantize, self.double_quant)
        else:
            params = jax.tree.map(lambda x: np.asarray(x).astype(stored), bare.init(jax.random.key(seed)))
        bare, params = self._with_room_for(bare, params, len(tokenizer), options)
        for name, token in special_ids(tokenizer, self.head == "causal").items():
            if token is not None:
                setattr(bare.config, name, token)
        if self.trains_adapter:
            params = self._add_adapter(bare, params, precision, datamodule, seed, options)
        else:
            self.network = bare
        return split(params, self.network.trainable(params))

    def _with_room_for(self, network: Network, params: Tree, num_tokens: int, options: dict[str, Any]
                       ) -> tuple[Network, Tree]:
        """Rows for the tokens that the tokenizer has beyond the model's; each is the mean of the old ones."""
        old = network.config.vocab_size
        if num_tokens <= old:
            return network, params
        say(f"The tokenizer has {num_tokens} tokens, the model {old}: {num_tokens - old} rows are added, "
            "each the mean of the old ones.")
        network.config.vocab_size = num_tokens
        wider = hub.network(network.config, self.head, **options)
        shapes = flatten(jax.eval_shape(wider.init, jax.random.key(0)))
        leaves = {}
        for path, leaf in flatten(params).items():
            missing = shapes[path].shape[0] - leaf.shape[0] if leaf.ndim else 0
            mean = leaf.astype(np.float32).mean(0, keepdims=True).astype(leaf.dtype) if missing else None
            leaves[path] = np.concatenate([leaf, np.repeat(mean, missing, 0)]) if missing else leaf
        return wider, unflatten(leaves)

    def _add_adapter(self, bare: Network, params: Tree, precision: str, datamodule: Any, seed: int,
                     options: dict[str, Any]) -> Tree:
        if self.lora is not None and datamodule.trainable_new_tokens:
            raise UserError("model.lora: rows of new tokens train beside an adapter only in the torch engine. Use "
                            "engine: torch, or full tuning.")
        settings = self.lora or adapters.adapter_settings(self.adapter)
        self.network = hub.network(bare.config, self.head, lora=settings, **options)
        for path, leaf in flatten(params).items():
            if isinstance(leaf, Quantized) and self.network.trains(path):
                raise UserError(quantised_in_full(self.network.torch_modules(".".join(path[:-1]))[0], leaf.kind))
        params = adapters.add_fresh(self.network, params, seed)
        leaves = flatten(params)
        if self.adapter is not None:
            leaves |= flatten(adapters.load_adapter(self.network, self.adapter))
        # As torch: what trains is float32, also beside a bfloat16 base, and so are that base's norms.
        trained = "bfloat16" if precision == "bf16-true" else "float32"
        for path in leaves:
            if self.network.trains(path):
                leaves[path] = leaves[path].astype(trained)
            elif precision == "bf16-mixed" and any("norm" in name for name in path):
                leaves[path] = leaves[path].astype(np.float32)
        return unflatten(leaves)

    # Steps -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def loss(self, params: Tree, rows: dict[str, Array], row_keys: Array | None, count_correct: bool) -> LossSums:
        """Summed loss and weight of rows [N, T]; compiled."""

    # Of each row, where a task needs it: (parameters, rows) -> a tree of arrays [N, ...]; compiled.
    predict: Callable[[Tree, dict[str, Array]], Any] | None = None

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, steps: Steps, weights: Weights, group: Group) -> None:
        """Take up a group of evaluation batches; nothing waits for the device."""
        self._sums.append(steps.eval_step(weights.trainable, weights.frozen, group.batch))

    def eval_results(self, role: str, datamodule: Any) -> tuple[dict[str, float], dict[str, Any]]:
        """Metrics of the evaluation that ends, and JSON files it leaves; the sums start anew.

        Args:
            role: `val` or `test`.
        """
        sums, self._sums = jax.device_get(self._sums), []
        total, weight, correct = (sum(float(part[name]) for part in sums) for name in ("total", "weight", "correct"))
        loss = total / weight if weight else math.nan
        # float64 ends near exp(709)
        return {"loss": loss, "accuracy": correct / weight if weight else math.nan,
                "perplexity": math.exp(min(loss, 700))}, {}

    @abstractmethod
    def outputs(self, steps: Steps, weights: Weights, group: Group, datamodule: Any, seed: int
                ) -> dict[int, Any]:
        """Outputs of predict for a group of batches, by the index of their rows."""

    # Export ----------------------------------------------------------------------------------------------------------

    def export(self, trainable: Tree, folder: Path) -> None:
        """Write the model, or its adapter, as a folder that from_pretrained / PeftModel reads.

        Args:
            trainable: What trains, on the host; all there is without an adapter.
        """
        if not self.trains_adapter:
            return hub.save(self.network, trainable, folder, self.save_dtype)
        if self.save_dtype:
            trainable = jax.tree.map(lambda x: x.astype(self.save_dtype), trainable)
        adapters.save_adapter(self.network, trainable, folder, self.pretrained)

    def describe(self, trainable: Tree, frozen: Tree) -> str:
        """Parameters and dtypes in a line."""
        leaves = [*flatten(trainable).values(), *flatten(frozen).values()]
        total, trains = (sum(leaf.size for leaf in part) for part in (leaves, jax.tree.leaves(trainable)))
        by_type: dict[str, int] = {}
        for leaf in leaves:
            by_type[str(leaf.dtype)] = by_type.get(str(leaf.dtype), 0) + leaf.size
        share = ", ".join(f"{name} {count / total:.1%}" for name, count in by_type.items())
        return f"Parameters: {total:,}, of which {trains:,} train ({trains / total:.2%}). Stored as: {share}."

    def flops_per_token(self, trainable: Tree, frozen: Tree) -> int:
        """Arithmetic of one training token, counted as in the torch engine."""
        leaves = flatten(frozen) | flatten(trainable)
        size = sum(leaf.size for leaf in leaves.values())
        tied = self.network.config.tie_word_embeddings
        looked_up = 0 if tied else leaves["embed", "tokens", "weight"].size
        return 4 * (size - looked_up) + 2 * sum(leaf.size for leaf in jax.tree.leaves(trainable))
