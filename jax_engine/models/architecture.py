"""Description of a network's architecture, common to all model families."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jax_engine.distributed.tree import IMAGE_LAYERS, IMAGE_MERGERS
from jax_engine.models.relative import Relative
from jax_engine.models.rope import Rope
from lmmods.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Head = Literal["causal", "masked", "qa", "sequence", "token", "choice"]
NormKind = Literal["layer", "layer_no_bias", "rms", "rms_wide", "rms_plus_one"]


@dataclass(frozen=True)
class Experts:
    """Mixture of experts (Shazeer et al. 2017): MLPs of which each token uses those with the highest router scores.

    Args:
        size: Number of inner features of an expert.
        normalised: Weights of a token's experts sum to 1; else they are the probabilities among all experts.
        bias: Experts and router have biases.
        transposed: Matrices are [in, out].
        clamp: Gain and limit of gpt-oss's activation: gate and up features alternate and are clipped to the limit, and
            the result is gate sigmoid(gain gate) (up + 1).
        has_mlp: The layer also has an MLP, and its update is the sum of both (Gemma 4). Experts read a separate norm
            of the residual stream, the router the stream itself; each of the two outputs is normed.
        scaled_router: The router divides each token by its root mean square and multiplies it by a learned vector. A
            learned factor of each expert multiplies its weight.
    """

    num: int
    per_token: int
    size: int
    normalised: bool = True
    bias: bool = False
    transposed: bool = False
    clamp: tuple[float, float] | None = None
    has_mlp: bool = False
    scaled_router: bool = False


@dataclass(frozen=True)
class Convolution:
    """Grouped convolution over `width` neighbouring tokens (He et al. 2021)."""

    width: int
    groups: int
    activation: str


@dataclass(frozen=True)
class Classifier:
    """Head with a score for each label: pooling, dropout, dense layer, activation, norm, dropout, and the scores.

    Args:
        pooling: Features that represent a row: its first token, its last real token, or the mean of its real tokens;
            None scores every position.
        size: Number of scores.
        dense: The head has a dense layer; `activation` applies even without it.
        activation: None is the identity.
        norm: The head has a norm, of the same kind as the network's norms.
        bias: The scores have biases; `dense_bias`: the dense layer has biases.
        dropout: Dropout before the scores; `dense_dropout` before the dense layer.
        std: Standard deviation of the scores' initial matrix; `dense_std` of the dense layer's. Default: the
            architecture's `init_std`.
    """

    pooling: Literal["first", "last", "mean"] | None = None
    size: int = 0
    dense: bool = False
    activation: str | None = None
    norm: bool = False
    bias: bool = True
    dense_bias: bool = True
    dropout: float = 0.0
    dense_dropout: float = 0.0
    std: float | None = None
    dense_std: float | None = None


@dataclass(frozen=True)
class WideHeads:
    """Heads of the layers with the attention `full_attn`, if they differ in size from the heads of `attn`.

    Args:
        layers: Indices of these layers.
        keys_as_values: Keys, before their norm and rotation, are the values.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    keys_as_values: bool = False


@dataclass(frozen=True)
class LinearHeads:
    """Heads of the layers with linear attention (Gated DeltaNet, Yang et al. 2025), named `linear_attn`.

    Args:
        layers: Indices of these layers.
        num_keys: Heads of queries and keys; each serves `num_values` / `num_keys` consecutive heads of values.
        width: Tokens that the convolution of queries, keys and values reads, including the current one.
    """

    layers: tuple[int, ...]
    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def num_features(self) -> int:
        """Total features of queries, keys and values."""
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim

    @property
    def flops_per_token(self) -> int:
        """FLOP per token of a forward pass: the products of each state with a key and a query, and its update."""
        return len(self.layers) * 3 * 2 * self.num_values * self.key_dim * self.value_dim


class LayerKind(NamedTuple):
    """Modules of a layer. Layers of one kind have the same parameters, in the same shapes.

    Args:
        routed: It has a mixture of experts, `moe`.
        attention: Name of its attention: `attn`, `full_attn` with `WideHeads`, `linear_attn` with `LinearHeads`.
        keys: Keys and values are computed for this layer (`own`), or also for later layers (`lent`), or `borrowed` from
            the last earlier layer with an attention of this name that lends them.
        mlp: Name of its MLP: `mlp` or `wide_mlp`; None if experts replace it.
    """

    routed: bool = False
    attention: Literal["attn", "full_attn", "linear_attn"] = "attn"
    keys: Literal["own", "lent", "borrowed"] = "own"
    mlp: Literal["mlp", "wide_mlp"] | None = "mlp"

    def has(self, module: str) -> bool:
        """Return True if a layer of this kind has a module, by our path inside the layers: `attn.q`."""
        part, _, inner = module.partition(".")
        if part == "linear_attn" or module == "attn.weights":  # the latter is a dropout site of any other attention
            return (part == "linear_attn") == (self.attention == "linear_attn")
        if not inner:  # dropout sites of any attention and MLP
            return True
        if part in ("attn", "full_attn"):
            return part == self.attention and not (self.keys == "borrowed" and inner in ("k", "v", "k_norm"))
        if part in ("mlp", "wide_mlp"):
            return part == self.mlp
        return self.routed if part == "moe" else True


@dataclass(frozen=True, kw_only=True)
class Images:
    """Encoder of images, whose features replace the embeddings of image tokens.

    Args:
        tower: Layers of its vision transformer.
        token: Id of the image token, one for each feature.
        patch: Height and width of a patch, in pixels.
        channels: Number of colours.
        factor: A feature is of a square of `factor` x `factor` patches.
        in_both_directions: Image tokens also attend to the later tokens of their image.
        may_start_random: This engine draws initial weights from the distributions of transformers.
        taps: Layers of the tower whose output is also mapped to features, which are added to the image tokens after
            the decoder's first, second, ... layer (DeepStack, Meng et al. 2024).
    """

    tower: "Architecture"
    token: int
    patch: int
    channels: int
    factor: int
    in_both_directions: bool = False
    may_start_random: bool = True
    taps: tuple[int, ...] = ()

    @property
    def mask_indices(self) -> tuple[int, ...]:
        """For each layer of the tower, the index of its mask in the encoder's `Stream.masks`."""
        return (0,) * self.tower.num_layers


@dataclass(frozen=True, kw_only=True)
class PaddedImages(Images):
    """Images padded to one size, for a SigLIP (Zhai et al. 2023).

    Args:
        size: Height and width of an image of full size, in pixels.
        projector: Features for the decoder: `shuffle` joins the patches of a square and maps them by a matrix
            (Idefics 3); `pool` averages them, and applies a norm and a matrix (Gemma 3).
        by_fraction: Positions of patches are fractions of the part of the image that is not padding.
    """

    size: int
    projector: Literal["shuffle", "pool"]
    by_fraction: bool = False


@dataclass(frozen=True, kw_only=True)
class PatchImages(Images):
    """Images of any size as flat patches, square by square (Qwen2-VL, Wang et al. 2024). Patches have rotary positions.

    Args:
        frames: Number of frames in a patch; an image is repeated.
        patch_bias: The map of patches has biases.
        side: Height and width of a learned table of positions, which is interpolated; None has no table.
        window: Height and width, in patches, of the windows to which attention is limited; None does not limit it.
        full_layers: Layers of the tower whose attention is not limited.
    """

    frames: int
    patch_bias: bool = False
    side: int | None = None
    window: int | None = None
    full_layers: tuple[int, ...] = ()

    @property
    def mask_indices(self) -> tuple[int, ...]:
        return tuple(int(self.window is not None and layer not in self.full_layers)
                     for layer in range(self.tower.num_layers))


@dataclass(frozen=True)
class Architecture:
    """Sizes and options of a transformer, a decoder (`causal`) or an encoder. Sizes are numbers of features.

    Args:
        norm: Kind of all norms; see Norm.
        norms: Positions of each sublayer's norms: on its `input` (pre-norm), on its `output`, on the residual `sum`
            after it (post-norm, Vaswani et al. 2017).
        first_norm: False if the first layer's attention lacks the input norm that the other layers have.
        parallel: Attention and MLP read the same residual stream (Wang & Komatsuzaki 2021), and with `shared_norm` they
            share a norm.
        positions: Learned table, sinusoids added to the embedding, rotary, or none.
        relative: Relative positions in the scores, in addition to `positions` or alone.
        ropes: Rotary embedding of each layer; they differ only in frequencies.
        embedding_size: Width of the embedding table, if it differs from the network's.
        embedding_scale: Factor on token embeddings; `scales_in_table` if transformers' table applies it, so that noise
            is added after it.
        padding_id: Row of the embedding that gets no gradient from the input, as torch's padding_idx.
        positions_after_padding: Positions count real tokens from padding_id + 1; padding has position padding_id.
        windows: Sliding window of each layer in tokens, including the query (for encoders, to each side); None attends
            to all tokens.
        attention_scales: Factor on the scores of each layer.
        passes: Index of the stored layer that each layer runs; layers may be shared (Lan et al. 2019).
        attention_cap: Soft cap c of the scores, c tanh(scores / c); `logit_cap` is the soft cap of the logits, after
            `logit_scale`.
        residual_scale: Factor on a sublayer's update of the residual stream.
        qkv: Separate matrices; or one fused matrix; or one that is fused by head.
        fused_gate_up: Gate and up are one matrix.
        qk_norm: Norms of queries and keys, per head or over the whole projection.
        convolution: Convolution of the embeddings, added after the first layer.
        sinks: Attention sinks: a learned logit per head, without a value (Xiao et al. 2023).
        qkv_limit: Queries, keys and values are clipped to this absolute value.
        experts: Mixture of experts that replaces the MLP or adds to it, in all but `dense_layers`; `mlp_size` is the
            size of the MLPs.
        wide_heads: Layers with heads of another size.
        linear_heads: Layers with linear attention.
        output_gate: The projection of queries has a gate after each head's query, whose sigmoid multiplies the head's
            output.
        num_borrowing: Number of last layers that borrow keys and values from an earlier layer (see `LayerKind`).
        wide_mlp_size: Inner features of the MLPs in these last layers, if they differ.
        value_norm: Values are divided by their root mean square, per head.
        layer_inputs: Features of each layer's additional input per token (per-layer embeddings); 0 is none.
        layer_scalar: A constant of each layer, read from files, multiplies the residual stream after the layer.
        layers_per_group: Set if torch's names number stored layers by group and index in the group.
        head_bias: The output layer of the vocabulary has a bias; `head_dense_bias`: the dense layer of a masked head.
        classifier: The head of a network that scores labels or answer spans.
        images: Encoder of images; None if the network reads only text.
        init_std: Standard deviation of initial matrices outside the layers; `layer_std` inside the layers, and
            `residual_std` for those that write to the residual stream; `head_std` for the dense layer of a masked head,
            if it differs.
        init_cut: Truncation of the initial distributions, in standard deviations.
        residual_dropout: Dropout of the attention's output; `mlp_dropout` of the MLP's, `mlp_inner_dropout` before its
            last matrix.
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
    scales_in_table: bool = False
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
    wide_heads: WideHeads | None = None
    linear_heads: LinearHeads | None = None
    output_gate: bool = False
    num_borrowing: int = 0
    wide_mlp_size: int | None = None
    value_norm: bool = False
    layer_inputs: int = 0
    layer_scalar: bool = False
    layers_per_group: int | None = None
    tied: bool = True
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_cap: float | None = None
    head_activation: str = "gelu"
    head_dense_bias: bool = True
    head_std: float | None = None
    classifier: Classifier | None = None
    images: Images | None = None
    init_cut: float | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    mlp_dropout: float = 0.0
    mlp_inner_dropout: float = 0.0

    @property
    def num_stored_layers(self) -> int:
        """Number of layers with weights; shared layers count once."""
        return max(self.passes) + 1

    def layers_with(self, module: str) -> tuple[int, ...]:
        """Return the stored layers that have this module (our path, for instance `layers.attn_norm`)."""
        if module.startswith(f"{IMAGE_LAYERS}."):
            return tuple(range(self.images.tower.num_layers))
        if module.startswith(f"{IMAGE_MERGERS}."):
            return tuple(range(len(self.images.taps)))
        layers = tuple(range(self.num_stored_layers))
        if module == "layers.attn_norm" and not self.first_norm:
            return layers[1:]
        if not module.startswith("layers.") or len(set(self.kinds)) == 1:
            return layers
        inside = module.removeprefix("layers.")
        return tuple(layer for layer in layers if self.kinds[layer].has(inside))

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each stored layer."""
        special = {layer: name for name, heads in (("full_attn", self.wide_heads), ("linear_attn", self.linear_heads))
                   if heads is not None for layer in heads.layers}
        names = [special.get(layer, "attn") for layer in range(self.num_stored_layers)]
        first = self.num_stored_layers - self.num_borrowing
        lenders = {name: layer for layer, name in enumerate(names[:first])} if self.num_borrowing else {}
        routed = [self.experts is not None and layer not in self.dense_layers for layer in range(len(names))]
        return tuple(LayerKind(
            routed[layer], name,
            "borrowed" if layer >= first else "lent" if lenders.get(name) == layer else "own",
            None if routed[layer] and not self.experts.has_mlp
            else "wide_mlp" if layer >= first and self.wide_mlp_size else "mlp") for layer, name in enumerate(names))

    def head_sizes(self, attention: str) -> tuple[int, int]:
        """Return the number of key-value heads, and the features of a head, of the layers with this attention."""
        wide = self.wide_heads if attention == "full_attn" else self
        return wide.num_kv_heads, wide.head_dim


@dataclass(frozen=True)
class ExpertFiles:
    """Names in files that store each expert's matrices separately; the network stacks them.

    Args:
        mlp: Name in files of the network's module `mlp`.
        gate: Matrix with the first rows of `gate_up_proj`; `up` has the other rows. `down` is `down_proj`.
    """

    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class Family:
    """A model family of transformers: the conversion of its configuration, and the mapping to its torch names.

    Args:
        architecture: Converts a configuration to an Architecture; raises UserError for unsupported options.
        base: Prefix of the base network's parameters.
        modules: Our module to the torch module inside the base, in torch's order; `{}` is the layer index (twice:
            group, and index in the group).
        classes: transformers class of each supported head.
        head_modules: For each head, our module to the full torch module, in torch's order.
        tied: For each head, torch names that are aliases of one of our leaves.
        base_of: Prefix of the base for heads with a different one.
        older: Prefixes of names in older files, to the current ones.
        in_files: Prefixes of names in files, to prefixes of torch's parameters, where transformers writes other names.
        expert_files: Names of experts in files, if these store them separately.
        dropouts: Our dropout sites to torch modules inside the base ("" is the base): the dropout module, the module
            whose attention weights are dropped (`.weights`), or the module that calls the dropout function.
        head_dropouts: For each head, its sites (`head.dense` before the dense layer, `head` before the scores) to full
            torch modules, in the order of calls.
        classifiers: For each head that scores labels, the function from the configuration to its `Classifier`, without
            the size; answer spans may omit it.
        first: Heads with parameters before the base's in torch's order, except for a pooler inside the base.
        renamed: For each head, names in files to names of parameters in torch's modules, where they differ.
    """

    architecture: Callable[[Any], Architecture]
    base: str
    modules: dict[str, str]
    classes: dict[Head, str]
    head_modules: dict[Head, dict[str, str]]
    tied: dict[Head, dict[str, str]] = field(default_factory=dict)
    base_of: dict[Head, str] = field(default_factory=dict)
    older: dict[str, str] = field(default_factory=dict)
    in_files: dict[str, str] = field(default_factory=dict)
    expert_files: ExpertFiles | None = None
    dropouts: dict[str, str] = field(default_factory=dict)
    head_dropouts: dict[Head, dict[str, str]] = field(default_factory=dict)
    classifiers: dict[Head, Callable[[Any], Classifier]] = field(default_factory=dict)
    first: tuple[Head, ...] = ()
    renamed: dict[Head, dict[str, str]] = field(default_factory=dict)

    def prefix(self, head: Head) -> str:
        """Return the prefix of the base network's parameters with this head."""
        return self.base_of.get(head, self.base)


def plain_layers(num_layers: int, scale: float, window: int | None = None) -> dict[str, tuple]:
    """Return the per-layer fields of an Architecture with identical, unshared layers."""
    return {"windows": (window,) * num_layers, "attention_scales": (scale,) * num_layers,
            "passes": tuple(range(num_layers))}


def initial_std(config: "PreTrainedConfig") -> float:
    """Return the standard deviation of initial matrices; as in transformers, 0.02 if it is 0 or not configured."""
    return config.initializer_range or 0.02


def refuse(config: "PreTrainedConfig", **unsupported: Any) -> None:
    """Raise UserError if a field of the configuration has another value than this one; missing fields are fine."""
    for name, expected in unsupported.items():
        value = getattr(config, name, expected)
        if value != expected and not (value is None and not expected):
            raise UserError(f"model.config: {config.model_type} with {name}: {value!r} is not supported by the JAX "
                            f"engine; only {expected!r} is. Use engine: torch.")
