"""Names of parameters in every family: all that patterns may match are torch's, and they tell the layer."""

import pytest
import torch
import transformers

from jax_engine.models import hub
from lmmods.core.settings import depth, num_layers
from tests.jax_engine.hf_reference import AUTO, fields_of
from tests.jax_engine.tested import PAIRS


@pytest.mark.parametrize(("name", "head"), PAIRS, ids=str)
def test_names_are_those_of_transformers_and_tell_the_layer(name, head):
    """Tied parameters have all their names."""
    config = transformers.CONFIG_MAPPING[name](**fields_of(name, head))
    with torch.device("meta"):
        model = getattr(transformers, AUTO[head]).from_config(config)
    model.tie_weights()
    theirs: dict[torch.nn.Parameter, set[str]] = {}
    for each, param in model.named_parameters(remove_duplicate=False):
        theirs.setdefault(param, set()).add(each)
    network = hub.network(config, head)
    assert [set(names) for names in network.all_names().values()] == list(theirs.values())
    # A name says of embeddings, layers and heads what the tree of the JAX network says by its structure.
    layers = num_layers(each for each, *_ in network.names())
    assert layers == network.num_named_layers == network.arch.num_stored_layers // (network.arch.layers_per_group or 1)
    for each, path, place in network.names():
        of_layer = None if place is None else network.arch.layers_with(".".join(path[:-1]))[place]
        wanted = {"embed": 0}.get(path[0], layers + 1) if of_layer is None else (
            1 + of_layer // (network.arch.layers_per_group or 1))
        assert depth(each, layers) == wanted, each
