"""The key table in both directions, for trees like the parameters and for parts of trees."""

import jax
import numpy as np
import pytest

from lmmods.core.errors import UserError


@pytest.mark.parametrize("name", ["albert", "modernbert", "xlm-roberta"])
def test_trees_convert_to_torch_names_and_back(make_ref, name):
    """Shared layers, a layer without a module that others have, and a leaf with two torch names."""
    net, params = make_ref(name, "masked").net, make_ref(name, "masked").params
    moments = jax.tree.map(lambda leaf: leaf**2, params)
    converted = net.from_torch(net.to_torch(moments))
    assert jax.tree.structure(converted) == jax.tree.structure(params)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(converted), jax.tree.leaves(moments)))


def test_part_of_a_tree_converts_to_torch_names_and_back(make_ref):
    net, params = make_ref("albert", "masked").net, make_ref("albert", "masked").params
    part = {"layers": {"attn": {"q": params["layers"]["attn"]["q"]}}}
    query = "albert.encoder.albert_layer_groups.{}.albert_layers.{}.attention.query.{}"
    assert set(net.to_torch(part)) == {query.format(group, position, leaf) for group in (0, 1) for position in (0, 1)
                                       for leaf in ("weight", "bias")}
    assert jax.tree.structure(net.from_torch(net.to_torch(part))) == jax.tree.structure(part)


def test_unknown_names_and_missing_layers_are_rejected(make_ref):
    net, params = make_ref("llama", "causal").net, make_ref("llama", "causal").params
    named = net.to_torch(params)
    with pytest.raises(UserError, match="not in this network: extra.weight"):
        net.from_torch(named | {"extra.weight": np.ones(2)})
    named.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(UserError, match="model.layers.1.mlp.up_proj.weight"):
        net.from_torch(named)
