"""One layer: attention and MLP with their norms and residual sums."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jax_engine.models.architecture import Architecture
from jax_engine.models.attention import Attention
from jax_engine.models.dropout import Seeds, dropout
from jax_engine.models.experts import Load, SparseMLP
from jax_engine.models.linear import ACTIVATIONS, Build, Linear, Norm
from jax_engine.models.relative import Table
from jax_engine.models.rope import Angles


class MLP(nnx.Module):
    """down(act(up(x))), gated (Shazeer 2020): down(act(gate(x)) * up(x))."""

    def __init__(self, arch: Architecture, build: Build):
        self.activation, self.gated, self.fused = arch.activation, arch.gated, arch.fused_gate_up
        self.inner_dropout = arch.mlp_inner_dropout
        kwargs = {"build": build, "bias": arch.mlp_bias, "conv1d": arch.conv1d, "std": arch.layer_std}
        if self.fused:
            self.gate_up = Linear(arch.hidden_size, 2 * arch.mlp_size, "layers.mlp.gate_up", **kwargs)
        else:
            self.gate = Linear(arch.hidden_size, arch.mlp_size, "layers.mlp.gate", **kwargs) if arch.gated else None
            self.up = Linear(arch.hidden_size, arch.mlp_size, "layers.mlp.up", **kwargs)
        self.down = Linear(arch.mlp_size, arch.hidden_size, "layers.mlp.down", **kwargs | {"std": arch.residual_std})

    def __call__(self, x: Array, seeds: Seeds | None) -> Array:
        return self.down(dropout(self._inner(x, seeds), self.inner_dropout, seeds, "layers.mlp.inner"), seeds)

    def _inner(self, x: Array, seeds: Seeds | None) -> Array:
        act = ACTIVATIONS[self.activation]
        if self.fused:
            gate, up = jnp.split(self.gate_up(x, seeds), 2, axis=-1)
            return act(gate) * up
        up = self.up(x, seeds)
        return act(self.gate(x, seeds)) * up if self.gated else act(up)


class Block(nnx.Module):
    """One layer of a decoder or encoder; the residual stream keeps the dtype in which it comes.

    `attn_norm` and `mlp_norm` are on a sublayer's input or on the sum after it, `..._out_norm` on its output.

    Args:
        routed: With experts.
    """

    def __init__(self, arch: Architecture, build: Build, routed: bool):
        self.arch, self.routed = arch, routed
        self.attn = Attention(arch, build)
        self.mlp = SparseMLP(arch, build) if routed else MLP(arch, build)
        for name in ("attn", "mlp"):
            own = {"input", "sum"} & set(arch.norms) and not (name == "mlp" and arch.shared_norm)
            own = own and len(arch.layers_with(f"layers.{name}_norm")) > 0
            for norm, has in ((f"{name}_norm", own), (f"{name}_out_norm", "output" in arch.norms)):
                setattr(self, norm, Norm(arch.hidden_size, arch.norm, arch.norm_eps) if has else None)

    def __call__(self, x: Array, mask: Array, scale: Array, angles: Angles | Table | None, seeds: Seeds | None,
                 cache: dict[str, Array] | None = None, start: Array | None = None, key_angles: Angles | None = None,
                 has_norm: Array | None = None, real: Array | None = None
                 ) -> tuple[Array, dict[str, Array] | None, Load | None]:
        """Residual stream [B, T, D] after this layer, the layer's cache, and the load of its experts.

        Args:
            has_norm: Whether this layer's attention has a norm on its input, where some have none.
            real: [B, T] which tokens the load counts; None counts none.
        """
        arch = self.arch
        normed = self._input(x, self.attn_norm)
        normed = normed if has_norm is None else jnp.where(has_norm, normed, x)
        mixed, cache = self.attn(normed, mask, scale, angles, seeds, cache, start, key_angles)
        after = self._added(x, mixed, self.attn_norm, self.attn_out_norm, arch.residual_dropout, seeds, "layers.attn")
        if arch.parallel:
            normed = normed if arch.shared_norm else self._input(x, self.mlp_norm)
        else:
            normed = self._input(after, self.mlp_norm)
        update, load = self.mlp(normed, real) if self.routed else (self.mlp(normed, seeds), None)
        return self._added(after, update, self.mlp_norm, self.mlp_out_norm, arch.mlp_dropout, seeds,
                           "layers.mlp"), cache, load

    def _input(self, x: Array, norm: Norm | None) -> Array:
        return norm(x) if norm is not None and "input" in self.arch.norms else x

    def _added(self, x: Array, update: Array, norm: Norm | None, out_norm: Norm | None, rate: float,
               seeds: Seeds | None, site: str) -> Array:
        """x plus what a sublayer made."""
        update = update if out_norm is None else out_norm(update)
        update = dropout(update, rate, seeds, site) * self.arch.residual_scale
        x = x + update.astype(x.dtype)
        return norm(x) if "sum" in self.arch.norms else x
