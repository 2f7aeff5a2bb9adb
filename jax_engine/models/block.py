"""One layer: attention and MLP with their norms and residual sums."""

from flax import nnx
from jax import Array

from jax_engine.models.architecture import Architecture
from jax_engine.models.attention import Attention
from jax_engine.models.dropout import Seeds, dropout
from jax_engine.models.linear import ACTIVATIONS, Build, Linear, Norm


class MLP(nnx.Module):
    """down(act(up(x))), gated (Shazeer 2020): down(act(gate(x)) * up(x))."""

    def __init__(self, arch: Architecture, build: Build):
        kwargs = {"build": build, "bias": arch.mlp_bias, "conv1d": arch.conv1d}
        self.activation = arch.activation
        self.gate = Linear(arch.hidden_size, arch.mlp_size, "layers.mlp.gate", std=arch.layer_std, **kwargs
                           ) if arch.gated else None
        self.up = Linear(arch.hidden_size, arch.mlp_size, "layers.mlp.up", std=arch.layer_std, **kwargs)
        self.down = Linear(arch.mlp_size, arch.hidden_size, "layers.mlp.down", std=arch.residual_std, **kwargs)

    def __call__(self, x: Array, seeds: Seeds | None) -> Array:
        act, up = ACTIVATIONS[self.activation], self.up(x, seeds)
        return self.down(act(up) if self.gate is None else act(self.gate(x, seeds)) * up, seeds)


class Block(nnx.Module):
    """One layer of a decoder or encoder; the residual stream keeps the dtype in which it comes."""

    def __init__(self, arch: Architecture, build: Build):
        self.arch = arch
        self.attn = Attention(arch, build)
        self.attn_norm = Norm(arch.hidden_size, arch.norm, arch.norm_eps)
        self.mlp = MLP(arch, build)
        self.mlp_norm = Norm(arch.hidden_size, arch.norm, arch.norm_eps)

    def __call__(self, x: Array, mask: Array, scale: Array, angles: tuple[Array, Array] | None, seeds: Seeds | None,
                 cache: dict[str, Array] | None = None, start: Array | None = None
                 ) -> tuple[Array, dict[str, Array] | None]:
        """Residual stream [B, T, D] after this layer, and the layer's cache."""
        post = self.arch.post_norm
        mixed, cache = self.attn(x if post else self.attn_norm(x), mask, scale, angles, seeds, cache, start)
        x = x + dropout(mixed, self.arch.residual_dropout, seeds, "layers.attn").astype(x.dtype)
        x = self.attn_norm(x) if post else x
        update = self.mlp(x if post else self.mlp_norm(x), seeds)
        x = x + dropout(update, self.arch.mlp_dropout, seeds, "layers.mlp").astype(x.dtype)
        return (self.mlp_norm(x) if post else x), cache
