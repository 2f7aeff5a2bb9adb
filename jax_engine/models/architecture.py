"""What a network is made of, in one vocabulary for all families."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from jax_engine.models.relative import Relative
from jax_engine.models.rope import Rope
from lmmods.core.errors import UserError

Head = Literal["causal", "masked", "qa"]
NormKind = Literal["layer", "layer_no_bias", "rms", "rms_wide", "rms_plus_one"]


@dataclass(frozen=True)
class Experts:
    """MLPs of which each token takes a few, those that a router likes best (Shazeer et al. 2017).

    Args:
        size: Number of features inside one of them.
        normalised: The shares of those that a token takes add up to 1; else they are the probabilities among all.
        bias: They and the router have biases.
        transposed: Their matrices are [in, out].
        clamp: Gain and limit of gpt-oss's form: gates and ups, which alternate, are cut off at the limit, and the
            result is gate sigmoid(gain gate) (up + 1).
    """

    num: int
    per_token: int
    size: int
    normalised: bool = True
    bias: bool = False
    transposed: bool = False
    clamp: tuple[float, float] | None = None


@dataclass(frozen=True)
class Convolution:
    """Neighbouring tokens weighted by place (He et al. 2021): `width` of them, features in `groups`."""

    width: int
    groups: int
    activation: str


@dataclass(frozen=True)
class Architecture:
    """Sizes and choices of a transformer, decoder (`causal`) or encoder. Sizes are numbers of features.

    Args:
        norm: See Norm.
        norms: Where each sublayer has one: on its `input`, on its `output`, on the residual `sum` after it (Vaswani
            et al. 2017).
        first_norm: Whether the attention of the first layer has the norm on its input that the others have.
        parallel: Attention and MLP read the same residual stream (Wang & Komatsuzaki 2021), and with `shared_norm`
            its same norm.
        positions: A learned table, sines and cosines added to the embedding, rotated queries and keys, or none.
        relative: Positions in the scores, beside those or alone.
        ropes: For each layer, how its queries and keys turn; they differ in frequencies alone.
        embedding_size: Width of the embedding table where it differs from the network's.
        padding_id: Row of the embedding that gets no gradient from the input, as torch's padding_idx.
        positions_after_padding: Positions count real tokens from padding_id + 1, and padding stays at padding_id.
        windows: For each layer, how far back it attends in tokens, itself included (an encoder: to each side), or None
            for everything.
        attention_scales: For each layer, the factor on query times key.
        passes: Which stored layer each step of the depth runs; layers may be shared (Lan et al. 2019).
        attention_cap: Scores are c tanh(scores / c) with this c; `logit_cap` does that to the logits, after
            `logit_scale`.
        residual_scale: On what a sublayer adds to the residual stream.
        qkv: Three matrices; or one of queries, keys and values; or one that has these for each head in turn.
        fused_gate_up: One matrix of gate and up.
        qk_norm: Norms of queries and keys, each head by itself or all at once.
        convolution: Beside the first layer, of the embeddings.
        sinks: A score for each head that takes its part of the weights and has no value (Xiao et al. 2023).
        qkv_limit: Queries, keys and values are cut off at this size.
        experts: In place of the MLP, but in `dense_layers`, which alone `mlp_size` then is of.
        layers_per_group: Set where torch's names number the stored layers by group and place in it.
        head_dense_bias: Of the dense layer with which an encoder's head begins.
        qa_dense: The head for answer spans begins with one too.
        init_std: Standard deviation of initial matrices outside the layers; `layer_std` of those inside, and
            `residual_std` of those that write to the residual stream; of an encoder's head `head_std` that of the dense
            layer and `qa_std` that of the answer spans, where they differ.
        init_cut: As many standard deviations from their mean initial values are drawn anew.
        residual_dropout: After the attention's output; `mlp_dropout` after the MLP's, `mlp_inner_dropout` before its
            last matrix, `qa_dropout` before the logits of answer spans.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    activation: str
    norm_eps: float
    init_std: float
    layer_std: float
    residual_std: float
    causal: bool
    windows: tuple[int | None, ...]
    attention_scales: tuple[float, ...]
    passes: tuple[int, ...]
    norm: NormKind = "layer"
    final_norm_eps: float | None = None
    norms: tuple[Literal["input", "output", "sum"], ...] = ("input",)
    first_norm: bool = True
    parallel: bool = False
    shared_norm: bool = False
    residual_scale: float = 1.0
    positions: Literal["learned", "sinusoid", "rope", "none"] = "learned"
    relative: Relative | None = None
    ropes: tuple[Rope, ...] = ()
    max_positions: int = 0
    num_types: int = 0
    embedding_size: int | None = None
    embedding_scale: float = 1.0
    padding_id: int | None = None
    positions_after_padding: bool = False
    sinusoid_init: bool = False
    conv1d: bool = False
    qkv: Literal["apart", "fused", "fused_by_head"] = "apart"
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    gated: bool = False
    fused_gate_up: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    attention_cap: float | None = None
    convolution: Convolution | None = None
    sinks: bool = False
    qkv_limit: float | None = None
    experts: Experts | None = None
    dense_layers: tuple[int, ...] = ()
    layers_per_group: int | None = None
    tied: bool = True
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_cap: float | None = None
    head_activation: str = "gelu"
    head_dense_bias: bool = True
    head_std: float | None = None
    qa_dense: bool = False
    qa_std: float | None = None
    init_cut: float | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    mlp_dropout: float = 0.0
    mlp_inner_dropout: float = 0.0
    qa_dropout: float = 0.0

    @property
    def num_stored_layers(self) -> int:
        """Layers with weights of their own."""
        return max(self.passes) + 1

    def layers_with(self, module: str) -> tuple[int, ...]:
        """Numbers of the stored layers that have this module of ours, `layers.attn_norm` for instance."""
        layers = tuple(range(self.num_stored_layers))
        if module == "layers.attn_norm" and not self.first_norm:
            return layers[1:]
        if self.dense_layers and module.startswith("layers.mlp."):
            routed = module.startswith(("layers.mlp.router", "layers.mlp.experts"))
            return tuple(layer for layer in layers if (layer in self.dense_layers) != routed)
        return layers


@dataclass(frozen=True)
class ExpertFiles:
    """How files name what the network has stacked: each matrix of each expert by itself.

    Args:
        mlp: The module in files that the network calls `mlp`.
        gate: The matrix whose rows come first in `gate_up_proj`; then those of `up`. `down` is `down_proj`.
    """

    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class Family:
    """One model family of transformers: its configuration in our terms and the key table of its torch names.

    Args:
        architecture: Configuration to Architecture; raises UserError for what is not supported.
        base: Prefix of the base network's parameters.
        modules: Our module to the torch module inside the base, in torch's order; `{}` is the number of the layer
            (two of them: number of the group and place in it).
        classes: The transformers class of each supported head.
        head_modules: For each head, our module to the full torch module, in torch's order.
        tied: For each head, torch names that are other names of one of our leaves.
        base_of: Prefix of the base where a head has another one.
        older: Beginnings of names in files, and what they are called now.
        expert_files: Where files hold experts one by one.
        dropouts: Our places of dropout to the torch modules inside the base that do it, or whose attention weights it
            is done to (`.weights`), or that do it by a function ("" is the base); `head` to the full name of its
            module.
        first: Heads whose parameters come before the base's in torch's order.
        renamed: For each head, names in files whose parameters torch's modules know by another one.
    """

    architecture: Callable[[Any], Architecture]
    base: str
    modules: dict[str, str]
    classes: dict[Head, str]
    head_modules: dict[Head, dict[str, str]]
    tied: dict[Head, dict[str, str]] = field(default_factory=dict)
    base_of: dict[Head, str] = field(default_factory=dict)
    older: dict[str, str] = field(default_factory=dict)
    expert_files: ExpertFiles | None = None
    dropouts: dict[str, str] = field(default_factory=dict)
    first: tuple[Head, ...] = ()
    renamed: dict[Head, dict[str, str]] = field(default_factory=dict)

    def prefix(self, head: Head) -> str:
        """Prefix of the base network's parameters under this head."""
        return self.base_of.get(head, self.base)


def plain_layers(num_layers: int, scale: float, window: int | None = None) -> dict[str, tuple]:
    """The per-layer fields of an Architecture whose layers are all alike and not shared."""
    return {"windows": (window,) * num_layers, "attention_scales": (scale,) * num_layers,
            "passes": tuple(range(num_layers))}


def initial_std(config: Any) -> float:
    """Standard deviation of first matrices, as transformers reads it: 0.02 where the configuration has 0 or none."""
    return config.initializer_range or 0.02


def refuse(config: Any, **unsupported: Any) -> None:
    """Raise UserError if a field of the configuration has a value other than the one given here.

    Fields that the configuration lacks are fine.
    """
    for name, wanted in unsupported.items():
        value = getattr(config, name, wanted)
        if value != wanted and not (value is None and not wanted):
            raise UserError(f"model.config: {config.model_type} with {name}: {value!r} is not supported by the JAX "
                            f"engine, only {wanted!r}. Use engine: torch.")
