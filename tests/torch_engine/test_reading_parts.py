"""With sharded parameters (FSDP2), each process reads only its own rows."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lmmods.core import lazy_array
from lmmods.core.errors import UserError
from lmmods.core.lazy_array import LazyArray
from lmmods.core.settings import LoRA
from lmmods.runs.checkpoint import WriterRank, open_checkpoint, write_checkpoint
from lmmods.torch_engine.callbacks.checkpoint import TORCH, FolderCheckpointIO
from lmmods.torch_engine.compat.torch import simulate_processes
from lmmods.torch_engine.nn.loading import load_pretrained, resize_embeddings
from lmmods.torch_engine.nn.lora import add_lora, continue_adapter
from lmmods.torch_engine.nn.principal import PrincipalParts
from lmmods.torch_engine.nn.sharding import load_into, local, place_like, shard
from lmmods.torch_engine.nn.stored import fill, pop_sources, read_shards
from tests.forks import together


@pytest.fixture
def sizes_read(monkeypatch):
    """Numbers of values that are read from files, in order of the reads."""
    sizes, lazy_file = [], lazy_array.lazy_file

    def counting(*args):
        return {name: LazyArray(array.shape, array.dtype, lambda part, array=array: sizes.append(array[part].numel())
                                or array[part], array.empty) for name, array in lazy_file(*args).items()}

    monkeypatch.setattr(lazy_array, "lazy_file", counting)
    return sizes


def test_a_process_reads_only_its_rows_of_a_checkpoint(tmp_path, sizes_read):
    """Weights and optimiser state, as the first of three processes, with three of seven rows."""
    weight = torch.arange(28).reshape(7, 4).bfloat16()
    write_checkpoint(tmp_path / "c", {
        "state_dict": {"w": weight},
        "optimizer_states": [{"state": {0: {"exp_avg": weight + 1, "step": torch.ones(())}}}],
        "sums": torch.ones(4)}, TORCH)
    content = open_checkpoint(tmp_path / "c", TORCH)
    assert torch.equal(content["sums"], torch.ones(4))
    state = content["optimizer_states"][0]["state"][0]
    assert state["step"] == 1
    sizes_read.clear()
    with simulate_processes(3):
        param = distribute_tensor(torch.zeros(7, 4, dtype=torch.bfloat16), init_device_mesh("cpu", (3,)), [Shard(0)],
                                  src_data_rank=None)
        load_into(param, content["state_dict"]["w"])
        assert torch.equal(local(param), weight[:3])
        average = place_like(state["exp_avg"], param)
        assert torch.equal(local(average), weight[:3] + 1) and average.placements == param.placements
    assert sizes_read == [12, 12]
    assert torch.equal(place_like(content["state_dict"]["w"], torch.zeros(7, 4)), weight)


def test_damage_found_by_another_process_is_reported(tmp_path):
    write_checkpoint(tmp_path / "c", {"state_dict": {"w": torch.ones(3)}}, TORCH)
    reader = FolderCheckpointIO()
    with pytest.raises(UserError, match="optimizer.safetensors is not"):
        reader.open_checkpoint(tmp_path / "c", lambda damage: damage | {1: "optimizer.safetensors is not ..."},
                               WriterRank(0, 2))
    damaged = tmp_path / "c" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="model.safetensors has changed since it was written"):
        reader.open_checkpoint(tmp_path / "c", lambda damage: damage, WriterRank(0, 1))


SIZES = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 3,
         "num_key_value_heads": 3, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "torch_file": transformers.LlamaConfig(**SIZES),
    "gpt2": transformers.GPT2Config(vocab_size=37, n_embd=24, n_layer=1, n_head=3, n_positions=16, bos_token_id=1,
                                    eos_token_id=2),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=3),
    "gpt_oss": transformers.GptOssConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2,
                                         layer_types=["full_attention"]),
}
NF4 = {"quantize": "nf4", "frozen": True}
ADAPTERS = {"plain": LoRA(rank=2, targets="all-linear"), "dora": LoRA(rank=2, targets=["q_proj"], dora=True),
            "modules_to_save": LoRA(rank=2, targets=["q_proj"], modules_to_save=["lm_head"]),
            "pissa": LoRA(rank=2, init="pissa")}


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes a model's folder by name and returns its path."""
    def make(name: str) -> Path:
        path = tmp_path / name
        if name == "adapter":
            build(str(make("llama")), NF4, "plain", 0, False).save_pretrained(path)
            return path
        if name == "saved":
            model = load_pretrained(transformers.AutoModelForCausalLM, str(make("llama")), device=torch.device("cpu"),
                                    **NF4)
            model.save_pretrained(path)
            return path
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(path)
        if name == "torch_file":
            torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
            (path / "model.safetensors").unlink()
        if name == "tied":  # a folder with both matrices
            weights = load_file(path / "model.safetensors")
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
            save_file(weights, path / "model.safetensors", {"format": "pt"})
        return path

    return make


def build(path: str, options: dict[str, Any], adapter: str | None, tokens: int, by_parts: bool) -> torch.nn.Module:
    """Return the network as `build_network` builds it."""
    parts = PrincipalParts(ADAPTERS["pissa"]) if adapter == "pissa" else None
    model = load_pretrained(transformers.AutoModelForCausalLM, path, device=torch.device("cpu"), by_parts=by_parts,
                            before_quantising=parts and parts.residual, **options)
    if tokens:
        fill(model.get_input_embeddings())
        fill(model.get_output_embeddings())
    new = resize_embeddings(model, 37 + tokens)
    torch.manual_seed(0)
    if adapter == "continued":
        return continue_adapter(model, str(Path(path).with_name("adapter")), torch.float32)
    if adapter is None:
        return model
    return add_lora(model, ADAPTERS[adapter], new, torch.float32, "CAUSAL_LM", principal=parts)


def collect_states(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Return bitsandbytes' state of each quantised weight."""
    states_by_name = {name: getattr(module, "quant_state", getattr(module, "state", None))
                      for name, module in model.named_modules()}
    return {name: vars(state) for name, state in states_by_name.items() if hasattr(state, "absmax")}


def assert_equal(one: Any, other: Any, name: str) -> None:
    assert type(one) is type(other), name
    if isinstance(one, torch.Tensor):
        one, other = local(one).detach(), local(other).detach()
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), name
    elif isinstance(one, dict):
        assert list(one) == list(other), name
        for key, value in one.items():
            assert_equal(value, other[key], f"{name}.{key}")
    elif hasattr(one, "absmax"):
        assert_equal(vars(one), vars(other), name)
    else:
        assert one == other, name


def compare_reads(cases: list[tuple[str, dict[str, Any], str | None, int]], rank: int, size: int) -> None:
    """In each process, compare the network read by parts with the one read whole and then sharded."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    for case in cases:
        results = []
        for by_parts in (False, True):
            model = build(*case, by_parts)
            model.requires_grad_(not case[1])
            sources = pop_sources(model)
            shard(model, model.get_base_model() if case[2] else model, mesh)
            assert bool(sources) == (by_parts and case[2] != "dora")
            assert not [name for name in sources if "lora" in name]
            read_shards(model, sources)
            model.eval()
            with torch.no_grad():
                logits = model(torch.tensor([[1, 2, 3, 4]])).logits
            results.append({"weights": dict(model.named_parameters()), "buffers": dict(model.named_buffers()),
                            "states": collect_states(model), "logits": logits})
        assert_equal(*results, str(case))


def compare_in_process(cases: list) -> None:
    compare_reads(cases, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


class Counting:
    """`safe_open` that counts the values read from each tensor."""

    counts: dict[str, int] = {}

    def __init__(self, *args: Any, **options: Any):
        self.opened = safe_open(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened, name)

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *error: Any) -> None:
        self.opened.__exit__(*error)

    def get_slice(self, name: str) -> Any:
        return CountedSlice(self.opened.get_slice(name), name)


class CountedSlice:
    def __init__(self, stored: Any, name: str):
        self.stored, self.name = stored, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stored, name)

    def __getitem__(self, part: Any) -> torch.Tensor:
        values = self.stored[part]
        Counting.counts[self.name] = Counting.counts.get(self.name, 0) + values.numel()
        return values


def count_reads(path: str) -> None:
    """Check in each of two processes that it reads only its half of each weight. Of a quantised matrix, it may read up
    to a row more at either end, where a quantisation block does not start with a row."""
    import safetensors

    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    safetensors.safe_open = Counting
    is_saved = path.endswith("saved")
    model = build(path, {"frozen": True} if is_saved else NF4, "plain", 0, True)
    assert is_saved or Counting.counts == {}
    sources = pop_sources(model)
    shard(model, model.get_base_model(), mesh)
    read_shards(model, sources)
    weights = load_file(Path(path) / "model.safetensors")
    for name, weight in weights.items():
        if is_saved and f"{name}.absmax" not in weights:
            continue
        rows = -(-weight.shape[0] // 2) if rank == 0 else weight.shape[0] // 2
        extra_rows = 2 if weight.ndim == 2 and ".layers." in name and not is_saved else 0
        assert rows <= Counting.counts[name] // weight[0].numel() <= rows + extra_rows, name


def test_a_quantised_base_read_by_parts_has_the_same_bits(folder):
    """The same as if each process had read the whole base."""
    cases = [(str(folder("llama")), NF4, "plain", 0), (str(folder("gpt_oss")), NF4, None, 0)]
    together([cases], 2, program=compare_in_process)


@pytest.mark.parametrize("name", ["llama", pytest.param("saved", marks=pytest.mark.slow)])
def test_no_process_reads_rows_of_another(folder, name):
    together([str(folder(name))], 2, program=count_reads)


@pytest.mark.slow
def test_all_kinds_of_bases_read_by_parts_have_the_same_bits(folder):
    """Full fine-tuning, tied, transposed, other dtypes, built of several tensors, saved in 4 bits; read whole."""
    paths = {name: str(folder(name)) for name in (*CONFIGS, "saved", "adapter")}
    together([[
        (paths["llama"], {}, None, 0), (paths["llama"], NF4, "dora", 0), (paths["llama"], NF4, "modules_to_save", 0),
        (paths["llama"], NF4, "plain", 3), (paths["llama"], NF4, "continued", 0),
        (paths["llama"], NF4, "pissa", 0), (paths["gpt2"], NF4, "pissa", 0),
        (paths["llama"], {"frozen": True}, "pissa", 0),
        (paths["tied"], NF4, "plain", 3), (paths["torch_file"], NF4, None, 0),
        (paths["tied"], {**NF4, "quantize": "fp4", "double_quant": False, "quant_storage": "float32"}, None, 0),
        (paths["gpt2"], NF4, None, 0), (paths["gpt2"], {}, None, 0), (paths["mixtral"], NF4, None, 0),
        (paths["mixtral"], {"precision": "bf16-true"}, None, 0), (paths["saved"], {"frozen": True}, "plain", 0)]], 2,
        program=compare_in_process)
