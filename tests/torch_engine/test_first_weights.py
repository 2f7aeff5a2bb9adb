"""First weights of any architecture on torch: transformers' distributions, from streams by name."""

import math

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmmods.core.initialization import Normal, Uniform, draw
from lmmods.torch_engine.nn import initialization, sharding
from lmmods.torch_engine.nn.initialization import InitialWeights, from_config
from lmmods.torch_engine.nn.stored import pop_sources, read_shards

SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
OTHERS = {  # beyond the families that both engines have: other kinds of layers and ways to start
    "gpt_neox": SMALL, "phi": SMALL, "modernbert": SMALL,  # the last one: truncated normal distributions
    "opt": {"vocab_size": 300, "hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "word_embed_proj_dim": 16},
    "mamba": {"vocab_size": 300, "hidden_size": 32, "state_size": 4},
    "qwen2_moe": SMALL | {"num_key_value_heads": 4, "num_experts": 4, "moe_intermediate_size": 16,
                          "shared_expert_intermediate_size": 16},
}


def config_of(name: str, depth: int):
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.CONFIG_MAPPING[name](**OTHERS[name], **special, num_hidden_layers=depth)


def scratch(name: str, depth: int = 2) -> dict[str, torch.Tensor]:
    auto = transformers.AutoModelForMaskedLM if name == "modernbert" else transformers.AutoModelForCausalLM
    return from_config(lambda: auto.from_config(config_of(name, depth)), 0).state_dict()


@pytest.mark.parametrize("name", OTHERS)
def test_distributions_are_those_of_transformers(name):
    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if name == "modernbert" else transformers.AutoModelForCausalLM
    theirs, ours = auto.from_config(config_of(name, 2)).state_dict(), scratch(name)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        found, size = ours[key], value.numel()
        if value.std() == 0 or name == "mamba" and key.endswith("A_log"):
            assert torch.equal(found, value), key
            continue
        assert torch.equal((found == 0).all(-1), (value == 0).all(-1)) and not torch.equal(found, value), key
        assert abs(found.mean() - value.mean()) < 5 * value.std() * math.sqrt(2 / size), key
        assert abs(found.var() / value.var() - 1) < 5 * math.sqrt(4 / size) + 25 / size, key
    if name == "modernbert":
        drawn = [key for key, value in ours.items() if value.std() > 0]
        assert all(ours[key].abs().max() <= theirs[key].std() * 3.5 for key in drawn if ours[key].numel() > 5000)


@pytest.mark.parametrize("name", OTHERS)
def test_a_parameter_depends_on_its_name_alone(name):
    """Not on the layers made before it; what an architecture scales by its depth is the same but for the scale."""
    shallow, deep = scratch(name), scratch(name, 3)
    shared = shallow.keys() & deep.keys()
    assert len(shared) == len(shallow)
    for key in shared:
        factor = shallow[key].std() / deep[key].std() if shallow[key].std() > 0 else 1.0
        torch.testing.assert_close(shallow[key], deep[key] * factor, rtol=1e-5, atol=1e-7)
    deep = {key: value for key, value in deep.items() if value.std() > 0 and "A_log" not in key}
    values = [tuple(value.flatten()[:4].tolist()) for value in deep.values()]
    assert len(values) - len(set(values)) == len(deep) - len({value.data_ptr() for value in deep.values()})  # tied


class Odd(nn.Module):
    """Draws its parameters in unusual ways, as code that comes with a model may."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Parameter(torch.empty(6, 4).normal_(std=2.0))
        self.data_alone = nn.Linear(4, 6)
        self.data_alone.weight.data.normal_(1.0, 0.5)
        self.parts = nn.Parameter(torch.zeros(6, 4))
        with torch.no_grad():
            self.parts[2:4].normal_()
            nn.init.uniform_(self.parts.T[1])
        self.padded = nn.Embedding(6, 4, padding_idx=1)
        self.twice = nn.Parameter(nn.init.normal_(torch.empty(6, 4)))
        nn.init.uniform_(self.twice)
        self.read = nn.Parameter(torch.empty(6, 4).normal_())
        self.copied = nn.Parameter(self.read.detach().clone() + 1)
        self.overwritten = nn.Parameter(nn.init.normal_(torch.empty(6, 4)))
        nn.init.ones_(self.overwritten)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.plain
        self.halves = nn.Parameter(torch.empty(6, 4, dtype=torch.bfloat16).normal_())
        self.register_buffer("table", torch.empty(6, 4).uniform_())
        self.loose = [torch.empty(6, 4).normal_()]
        self.on_meta = torch.empty(3, device="meta").normal_()


@pytest.fixture
def odd() -> Odd:
    with InitialWeights(0) as weights:
        model = Odd()
        weights.start(model, lambda: None)
    return model


def stream(name: str, distribution=Normal(1.0)) -> torch.Tensor:
    return torch.from_numpy(draw(0, name, distribution, (6, 4)))


def test_draws_reach_the_parameter_by_any_way(odd):
    assert torch.equal(odd.plain, stream("plain", Normal(2.0))) and odd.tied.weight is odd.plain
    assert torch.equal(odd.data_alone.weight, stream("data_alone.weight", Normal(0.5, 1.0)))
    padded = stream("padded.weight")
    padded[1] = 0
    assert torch.equal(odd.padded.weight, padded)
    assert torch.equal(odd.twice, stream("twice", Uniform(0.0, 1.0)))
    assert (odd.overwritten == 1).all()
    assert torch.equal(odd.halves, stream("halves").bfloat16())
    assert torch.equal(odd.table, stream("table", Uniform(0.0, 1.0)))
    assert odd.loose[0].std() > 0.5 and odd.on_meta.is_meta
    assert all(p.requires_grad for p in odd.parameters())


def test_a_part_is_drawn_once_the_rest_is_there(odd):
    """While a model is made its parameters have no names: values that are read at once are of numbered streams."""
    assert not odd.parts[0, [0, 2, 3]].any() and (odd.parts[:, 1] >= 0).all() and odd.parts[2:4].std() > 0.2
    assert torch.equal(odd.copied, odd.read + 1) and odd.read.std() > 0.5


def test_parts_of_a_known_parameter_have_the_values_of_the_whole():
    model = nn.Module()
    model.joined = nn.Parameter(torch.zeros(6, 4))
    with InitialWeights(0) as weights:
        def initialize() -> None:
            nn.init.normal_(model.joined[:2])
            nn.init.normal_(model.joined[:, 3])

        weights.start(model, initialize)
    whole = stream("joined")
    assert torch.equal(model.joined[:2], whole[:2]) and torch.equal(model.joined[:, 3], whole[:, 3])
    assert not model.joined[2:, :3].any()


def test_nothing_stays_behind():
    """Once it is left, torch draws as ever, and transformers initialises as ever."""
    from transformers import PreTrainedModel

    methods = PreTrainedModel.init_weights, PreTrainedModel.initialize_weights
    with pytest.raises(ZeroDivisionError):
        from_config(lambda: 1 / 0, 0)
    assert (PreTrainedModel.init_weights, PreTrainedModel.initialize_weights) == methods
    torch.manual_seed(0)
    first = torch.empty(3).normal_()
    torch.manual_seed(0)
    assert torch.equal(first, torch.empty(3).normal_())


class Wrapped(nn.Module):
    """A network within the module that is sharded, as a task has it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", ["gpt_neox", "opt"])  # the second has a row of zeros, and tied matrices
def test_a_process_draws_the_rows_that_it_keeps(name, rank, monkeypatch):
    def make():
        return transformers.AutoModelForCausalLM.from_config(config_of(name, 2))

    whole, num_rows = from_config(make, 3).state_dict(), {}

    def drawn(seed, name, distribution, shape, part):
        num_rows[name] = len(range(shape[0])[part[0]])
        return draw(seed, name, distribution, shape)[part]

    monkeypatch.setattr(initialization, "init_part", drawn)
    torch.distributed.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
    try:
        model = from_config(make, 3, by_parts=True)
        matrices = {name for name, p in model.named_parameters() if p.ndim == 2}
        stored = pop_sources(model)
        assert set(stored) == matrices and not num_rows
        mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
        sharding.shard(Wrapped(model), model, mesh)
        read_shards(model, stored)
        assert not stored and num_rows.keys() == matrices
        for key, param in model.named_parameters():
            rows = -(-param.shape[0] // 3)
            expected = whole[key][rows * rank:rows * (rank + 1)]
            assert torch.equal(param.to_local(), expected), key
            assert key not in matrices or num_rows[key] == len(expected)
    finally:
        torch.distributed.destroy_process_group()
