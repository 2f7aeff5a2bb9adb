"""Tensor parallelism: networks with split matrices equal the whole networks, for every supported family."""

import os

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lmmods.torch_engine.nn.sharding import FAMILIES, split_matrices
from tests.forks import together

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0,
               "attention_multiplier": 0.5}
FAMILY_FIELDS = {"granite": MULTIPLIERS, "smollm3": {"no_rope_layers": [1, 0]}, "mistral": {"sliding_window": 4}}


def compare_families(*families: str) -> None:
    """Check logits and gradients of two processes that split the matrices."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    for family in families:
        config = AutoConfig.for_model(family, **SIZES, **FAMILY_FIELDS.get(family, {}), attn_implementation="sdpa")
        results = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            network = AutoModelForCausalLM.from_config(config)
            for parameter in network.parameters():  # biases, too
                torch.nn.init.normal_(parameter, std=0.2)
            if is_sharded:
                split_matrices(network, mesh)
                assert any(hasattr(parameter, "to_local") and parameter.to_local().numel() < parameter.numel()
                           for parameter in network.parameters())
            logits = network(input_ids=ids, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
            results.append({"logits": logits} | {name: getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)()
                                                 for name, p in network.named_parameters()})
        whole, split = results
        for name, value in whole.items():
            scale = value.abs().max()
            assert scale > 0 and (split[name] - value).abs().max() <= 1e-5 * scale, (family, name)
        print(family, "agrees")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_every_family_computes_the_same_with_split_matrices():
    for output in together(list(FAMILIES), processes=2, program=compare_families):
        assert output.count("agrees") == len(FAMILIES)
