"""Initial weights of any architecture on torch: transformers' distributions, from random streams by name."""

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
OTHERS = {  # architectures with other layers and initialisations than those of both engines
    "gpt_neox": SMALL, "phi": SMALL, "modernbert": SMALL,  # modernbert has truncated normal distributions
    "opt": {"vocab_size": 300, "hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "word_embed_proj_dim": 16},
    "mamba": {"vocab_size": 300, "hidden_size": 32, "state_size": 4},
    "qwen2_moe": SMALL | {"num_key_value_heads": 4, "num_experts": 4, "moe_intermediate_size": 16,
                          "shared_expert_intermediate_size": 16},
}


def make_config(name: str, depth: int):
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.CONFIG_MAPPING[name](**OTHERS[name], **special, num_hidden_layers=depth)


def init_state(name: str, depth: int = 2) -> dict[str, torch.Tensor]:
    auto = transformers.AutoModelForMaskedLM if name == "modernbert" else transformers.AutoModelForCausalLM
    return from_config(lambda: auto.from_config(make_config(name, depth)), 0).state_dict()


@pytest.mark.parametrize("name", OTHERS)
def test_initial_distributions_equal_transformers(name):
    torch.manual_seed(0)
    auto = transformers.AutoModelForMaskedLM if name == "modernbert" else transformers.AutoModelForCausalLM
    expected, weights = auto.from_config(make_config(name, 2)).state_dict(), init_state(name)
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        tensor, size = weights[key], value.numel()
        if value.std() == 0 or name == "mamba" and key.endswith("A_log"):
            assert torch.equal(tensor, value), key
            continue
        assert torch.equal((tensor == 0).all(-1), (value == 0).all(-1)) and not torch.equal(tensor, value), key
        assert abs(tensor.mean() - value.mean()) < 5 * value.std() * math.sqrt(2 / size), key
        assert abs(tensor.var() / value.var() - 1) < 5 * math.sqrt(4 / size) + 25 / size, key
    if name == "modernbert":
        random_keys = [key for key, value in weights.items() if value.std() > 0]
        assert all(weights[key].abs().max() <= expected[key].std() * 3.5 for key in random_keys
                   if weights[key].numel() > 5000)


@pytest.mark.parametrize("name", OTHERS)
def test_a_parameters_initial_values_depend_on_its_name_alone(name):
    """Not on layers made before it. Only an architecture's scaling by depth may change the values."""
    shallow, deep = init_state(name), init_state(name, 3)
    shared = shallow.keys() & deep.keys()
    assert len(shared) == len(shallow)
    for key in shared:
        factor = shallow[key].std() / deep[key].std() if shallow[key].std() > 0 else 1.0
        torch.testing.assert_close(shallow[key], deep[key] * factor, rtol=1e-5, atol=1e-7)
    deep = {key: value for key, value in deep.items() if value.std() > 0 and "A_log" not in key}
    values = [tuple(value.flatten()[:4].tolist()) for value in deep.values()]
    assert len(values) - len(set(values)) == len(deep) - len({value.data_ptr() for value in deep.values()})  # tied


class Odd(nn.Module):
    """Initialises its parameters in unusual ways, as remote model code may."""

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
def odd_model() -> Odd:
    with InitialWeights(0) as weights:
        model = Odd()
        weights.start(model, lambda: None)
    return model


def draw_stream(name: str, distribution=Normal(1.0)) -> torch.Tensor:
    return torch.from_numpy(draw(0, name, distribution, (6, 4)))


def test_every_way_to_initialise_a_parameter_uses_its_stream(odd_model):
    assert torch.equal(odd_model.plain, draw_stream("plain", Normal(2.0))) and odd_model.tied.weight is odd_model.plain
    assert torch.equal(odd_model.data_alone.weight, draw_stream("data_alone.weight", Normal(0.5, 1.0)))
    padded = draw_stream("padded.weight")
    padded[1] = 0
    assert torch.equal(odd_model.padded.weight, padded)
    assert torch.equal(odd_model.twice, draw_stream("twice", Uniform(0.0, 1.0)))
    assert (odd_model.overwritten == 1).all()
    assert torch.equal(odd_model.halves, draw_stream("halves").bfloat16())
    assert torch.equal(odd_model.table, draw_stream("table", Uniform(0.0, 1.0)))
    assert odd_model.loose[0].std() > 0.5 and odd_model.on_meta.is_meta
    assert all(p.requires_grad for p in odd_model.parameters())


def test_values_read_during_construction_come_from_numbered_streams(odd_model):
    """Parameters have no names while a model is built."""
    assert not odd_model.parts[0, [0, 2, 3]].any()
    assert (odd_model.parts[:, 1] >= 0).all() and odd_model.parts[2:4].std() > 0.2
    assert torch.equal(odd_model.copied, odd_model.read + 1) and odd_model.read.std() > 0.5


def test_parts_of_a_parameter_have_the_values_of_the_whole():
    model = nn.Module()
    model.joined = nn.Parameter(torch.zeros(6, 4))
    with InitialWeights(0) as weights:
        def initialize() -> None:
            nn.init.normal_(model.joined[:2])
            nn.init.normal_(model.joined[:, 3])

        weights.start(model, initialize)
    whole = draw_stream("joined")
    assert torch.equal(model.joined[:2], whole[:2]) and torch.equal(model.joined[:, 3], whole[:, 3])
    assert not model.joined[2:, :3].any()


def test_torch_and_transformers_are_restored_after_an_error():
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
    """Module that contains the network, like a task."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", ["gpt_neox", "opt"])  # opt has a row of zeros and tied matrices
def test_a_process_initialises_only_its_own_rows(name, rank, monkeypatch):
    def make():
        return transformers.AutoModelForCausalLM.from_config(make_config(name, 2))

    whole, num_rows = from_config(make, 3).state_dict(), {}

    def count_rows(seed, name, distribution, shape, part):
        num_rows[name] = len(range(shape[0])[part[0]])
        return draw(seed, name, distribution, shape)[part]

    monkeypatch.setattr(initialization, "init_part", count_rows)
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
