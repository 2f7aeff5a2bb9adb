"""Toy network with the interface of `jax_engine.models`."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_engine.distributed.mesh import gather, look_up
from jax_engine.distributed.tree import flatten, unflatten
from jax_engine.models.dropout import Seeds, dropout, token_words
from lmmods.core.lazy_array import lazy, stack


class Toy:
    """Embedding, layers that mix each token with the mean of the previous ones, and a head tied to the embedding.

    `hidden` and `logits` are functions of a nested dict; layers are stacked; dropout depends on `token_seeds`.
    """

    vocab_size, size, num_layers, rate = 64, 16, 3, 0.2
    names_of = {("embed", "tokens", "weight"): "embed.weight",
                ("layers", "mlp", "up", "weight"): "layers.{}.up.weight",
                ("layers", "mlp", "up", "bias"): "layers.{}.up.bias",
                ("layers", "attn_norm", "weight"): "layers.{}.norm",
                ("head", "bias"): "head.bias"}

    def __init__(self):
        self.num_traces = 0

    def init(self, key):
        keys = jax.random.split(key, 2)
        shape = (self.num_layers, self.size, self.size)
        return {"embed": {"tokens": {"weight": jax.random.normal(keys[0], (self.vocab_size, self.size))}},
                "layers": {"mlp": {"up": {"weight": 0.3 * jax.random.normal(keys[1], shape),
                                          "bias": jnp.zeros(shape[:2])}},
                           "attn_norm": {"weight": jnp.ones(shape[:2])}},
                "head": {"bias": jnp.zeros(self.vocab_size)}}

    def hidden(self, params, batch, training=False):
        self.num_traces += 1
        mask = batch["attention_mask"][..., None].astype(jnp.float32)
        x = look_up(params["embed"]["tokens"]["weight"], batch["input_ids"])

        def layer(x, step):
            params, depth = step
            mean = jnp.cumsum(x * mask, 1) / jnp.maximum(jnp.cumsum(mask, 1), 1)
            y = (x + mean) * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * params["attn_norm"]["weight"]
            weight = gather("layers.mlp.up.weight", params["mlp"]["up"]["weight"])
            y = jnp.tanh(y @ weight.T + params["mlp"]["up"]["bias"])
            if training:
                y = dropout(y, self.rate, Seeds(token_words(batch), {"layer": depth.astype(jnp.uint32)}), "layer")
            return x + y, None

        return jax.lax.scan(layer, x, (params["layers"], jnp.arange(self.num_layers)))[0]

    def logits(self, params, hidden):
        return hidden @ params["embed"]["tokens"]["weight"].T + params["head"]["bias"]

    def decays(self, params):
        return unflatten({path: path[-1] == "weight" and path[-2] != "attn_norm" for path in flatten(params)})

    def to_torch(self, tree):
        leaves, named = flatten(tree), {}
        for path, name in self.names_of.items():
            if path in leaves and path[0] != "layers":
                named[name] = np.asarray(leaves[path])
        for layer in range(self.num_layers):
            named |= {name.format(layer): np.asarray(leaves[path])[layer]
                      for path, name in self.names_of.items() if path in leaves and path[0] == "layers"}
        return named

    def from_torch(self, named):
        return unflatten({path: named[name] if path[0] != "layers" else
                          stack([lazy(named[name.format(layer)]) for layer in range(self.num_layers)])
                          for path, name in self.names_of.items() if name.format(0) in named})
