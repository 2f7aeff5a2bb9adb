"""All names of each parameter, by which patterns choose what trains: the same as torch's in every family."""

import pytest
import torch
import transformers

from jax_engine.models import hub
from tests.jax_engine.hf_reference import AUTO, fields_of
from tests.jax_engine.tested import PAIRS


@pytest.mark.parametrize(("name", "head"), PAIRS, ids=str)
def test_names_are_those_of_transformers(name, head):
    """Tied ones have all their names."""
    config = transformers.CONFIG_MAPPING[name](**fields_of(name, head))
    with torch.device("meta"):
        model = getattr(transformers, AUTO[head]).from_config(config)
    model.tie_weights()
    theirs: dict[torch.nn.Parameter, set[str]] = {}
    for each, param in model.named_parameters(remove_duplicate=False):
        theirs.setdefault(param, set()).add(each)
    ours = hub.network(config, head).all_names()
    assert [set(names) for names in ours.values()] == list(theirs.values())
