"""Quantised weights compared with bitsandbytes: bits, values, networks, saved folders, adapters."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import bitsandbytes as bnb
import bitsandbytes.functional as F
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_reference import AUTO, FAMILIES
from peft import LoraConfig, get_peft_model

from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.tree import flatten, merge
from jax_engine.models import hub, loading, quant
from jax_engine.models import lora as adapters
from lmmods.core import lazy_array
from lmmods.core.errors import UserError
from lmmods.core.hf_config import load_config
from lmmods.core.lazy_array import LazyArray, lazy_file
from lmmods.core.settings import LoRA
from lmmods.torch_engine.compat.bitsandbytes import patch_cpu_kernels

# Rows of whole blocks; rows that start inside a block; a short last block; an odd number of elements.
SHAPES = [(96, 128), (24, 96), (33, 20), (7, 13), (520, 64)]
STACKS = [(3, 40, 64), (5, 7, 13)]  # of experts, which bitsandbytes treats as one long row


@pytest.fixture(autouse=True, scope="module")
def exact_kernels():
    patch_cpu_kernels(torch.nn.ModuleList([bnb.nn.Linear4bit(64, 64)]))


def make_weight(shape, dtype=torch.float32) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    values[0] = 0
    return values


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(jnp.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def quantise(*args, **options):
    return jax.tree.map(np.asarray, quant.quantize(*args, **options))


@pytest.mark.parametrize("shape", [*SHAPES, *STACKS])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bit_codes_and_values_equal_bitsandbytes(kind, double, shape, dtype):
    packed, state = F.quantize_4bit(make_weight(shape, dtype), quant_type=kind, compress_statistics=double)
    actual = quantise(as_numpy(make_weight(shape, dtype)), kind, double)
    assert np.array_equal(actual.packed.reshape(-1)[:packed.numel()], packed.numpy().reshape(-1))
    assert np.array_equal(actual.absmax.reshape(-1), state.absmax.numpy())
    if double:
        assert np.allclose(actual.nested[0], state.state2.absmax.numpy(), rtol=1e-6, atol=1e-6)
        assert np.allclose(actual.nested[1], state.offset.numpy(), rtol=1e-6)
    values = jax.jit(lambda w: w.astype(jnp.float32))(actual)
    state.dtype = torch.float32
    assert values.shape == actual.shape == shape
    assert np.abs(values - F.dequantize_4bit(packed, state).numpy()).max() <= 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_codes_and_values_equal_bitsandbytes(shape):
    codes, absmax, _ = F.int8_vectorwise_quant(make_weight(shape)[1:].half())
    actual = quantise(make_weight(shape)[1:].numpy(), "int8")
    assert np.array_equal(actual.codes, codes.numpy()) and np.array_equal(actual.row_absmax, absmax.numpy())
    assert np.allclose(actual.astype(jnp.float32), F.int8_vectorwise_dequant(codes, absmax).numpy(), rtol=1e-6)
    zero = quantise(np.zeros((2, 8), np.float32), "int8")
    assert not np.any(zero.astype(jnp.float32))


def test_quantising_in_chunks_gives_the_same_bits(monkeypatch):
    whole = quantise(make_weight((24, 96)).numpy(), "nf4")
    monkeypatch.setattr(quant, "_CHUNK", 256)
    chunked = quantise(make_weight((24, 96)).numpy(), "nf4")
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(chunked), strict=True))


def test_rows_of_stacked_matrices_can_be_sliced():
    values = np.arange(60).reshape(3, 4, 5)
    joined = lazy_array.lazy(values).concatenate_rows()
    for rows in (slice(0, 12), slice(2, 5), slice(4, 8), slice(7, 12), slice(3, 3)):
        assert np.array_equal(joined[rows, 1:4], values.reshape(12, 5)[rows, 1:4])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("nf4", False), ("int8", True)])
@pytest.mark.parametrize("transposed", [False, True])
def test_slices_read_by_three_processes_equal_the_whole_matrix(kind, double, shape, transposed):
    """Each process requests other slices of every array, which end inside blocks."""
    values = make_weight(shape).numpy()
    whole = jax.tree.leaves(quantise(values, kind, double, transposed))
    barrier, gathered = threading.Barrier(3, timeout=10), {}

    def gather(local):
        gathered.update(local)
        barrier.wait()
        result = dict(gathered)
        barrier.wait()
        return result

    def read_slices(rank):
        lazy = quant.quantize(values, kind, double, transposed, quant.ProcessGroup(rank, 3, gather))
        for array, expected in zip(jax.tree.leaves(lazy), whole, strict=True):
            slices = tuple(slice(length * rank // 3, length * (rank + 1) // 3) for length in array.shape)
            for axis in range(array.ndim + 1):
                part = slices[:axis] + (slice(None),) * (array.ndim - axis)
                assert np.array_equal(array[part], expected[part])
        return array.shape == expected.shape

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(read_slices, range(3)))


@pytest.mark.numerics
def test_the_dynamic_type_equals_that_of_bitsandbytes():
    """To the bit where the CPU fuses products and sums, as `torch.linspace`, of which it is made, then rounds
    `first + step * n` once. Elsewhere that is rounded twice, and the mean of two such numbers may differ by two units.
    """
    np.testing.assert_array_max_ulp(quant.DYNAMIC, F.create_dynamic_map().numpy(), maxulp=2)


# Networks ------------------------------------------------------------------------------------------------------------


# Label heads and poolers, which train fully.
HEAD_MODULES = ["classifier", "score", "pooler", "bert.pooler", "roberta.pooler", "pre_classifier", "sequence_summary",
                "head"]


def quantise_on_torch(folder, head, kind, **options):
    skip = {"qa": ["qa_outputs", "classifier"], "causal": None, "masked": None}.get(head, HEAD_MODULES)
    config = (transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip) if kind == "int8" else
              transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, llm_int8_skip_modules=skip,
                                              bnb_4bit_compute_dtype=torch.float32, **options))
    model = getattr(transformers, AUTO[head]).from_pretrained(folder, quantization_config=config, device_map="cpu",
                                                              dtype=torch.float32)
    patch_cpu_kernels(model)
    if kind != "int8":
        double = options.get("bnb_4bit_use_double_quant", False)
        for parameter in stacked_experts(model).values():
            parameter.data = F.dequantize_4bit(*F.quantize_4bit(parameter.data, quant_type=kind,
                                                                compress_statistics=double))
    return model


def stacked_experts(model) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters()
            if ".experts." in name and parameter.ndim == 3}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function that writes a small random model; some of its rows are whole blocks, others are not."""
    def write(name, head):
        config = transformers.CONFIG_MAPPING[name](**FAMILIES[name])
        torch.manual_seed(0)
        model = getattr(transformers, AUTO[head]).from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.25)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return str(folder)

    return write


def network_and_params(folder, head, **options):
    network = hub.network(load_config(folder), head)
    return network, loading.load(network, folder, **options)


def batch_of(vocab_size: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(4, vocab_size, (3, 9))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def compute_logits(network, params, batch) -> np.ndarray:
    return np.asarray(jax.jit(lambda p: network.logits(p, network.hidden(p, batch)))(params))


def assert_logits_equal_torchs(folder, head, kind, double):
    options = {} if kind == "int8" else {"bnb_4bit_use_double_quant": double}
    model = quantise_on_torch(folder, head, kind, **options)
    if kind == "int8":
        model.train()  # in eval mode, it quantises activations too
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    network, params = network_and_params(str(folder), head, quantize=kind, double_quant=double)
    batch = batch_of(network.config.vocab_size)
    expected = model(**{key: torch.from_numpy(value) for key, value in batch.items()}).logits.detach().numpy()
    assert np.abs(compute_logits(network, params, batch) - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(("name", "head", "kind", "double"), [
    ("llama", "causal", "fp4", False), ("gpt2", "causal", "int8", True), ("gemma", "causal", "nf4", False),
    ("llama", "causal", "int8", True), ("bert", "masked", "fp4", True)])
def test_logits_of_quantised_models_equal_torchs(folder_of, name, head, kind, double):
    """`test_jax_families.py` checks double-quantised nf4 in every family."""
    assert_logits_equal_torchs(folder_of(name, head), head, kind, double)


@pytest.mark.parametrize(("name", "kind"), [("llama", "nf4"), ("gpt2", "fp4"), ("llama", "int8"), ("bert", "nf4")])
def test_folders_saved_by_bitsandbytes_load_the_same_codes(folder_of, name, kind, tmp_path):
    head = "masked" if name == "bert" else "causal"
    folder = folder_of(name, head)
    for double in (True, False):
        options = {} if kind == "int8" else {"bnb_4bit_use_double_quant": double}
        quantise_on_torch(folder, head, kind, **options).save_pretrained(tmp_path / str(double))
        _, saved = network_and_params(str(tmp_path / str(double)), head)
        _, fresh = network_and_params(folder, head, quantize=kind, double_quant=double)
        saved, fresh = flatten(saved), flatten(fresh)
        assert saved.keys() == fresh.keys()
        for path, leaf in fresh.items():
            assert jax.tree.structure(leaf) == jax.tree.structure(saved[path])
            for actual, expected in zip(jax.tree.leaves(leaf), jax.tree.leaves(saved[path]), strict=True):
                assert np.allclose(actual, expected, rtol=1e-6, atol=1e-7), path


@pytest.mark.parametrize("kind", ["nf4", None])
def test_a_mesh_reads_each_value_of_a_folder_once(tmp_path, kind, monkeypatch):
    folder, read_sizes = str(tmp_path), []
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=48, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=False)).save_pretrained(folder)

    def counting(file):
        def counted(array):
            return LazyArray(array.shape, array.dtype, lambda part: read_sizes.append(array[part].size) or array[part])
        return {key: counted(array) for key, array in lazy_file(file).items()}

    network, whole = network_and_params(folder, "causal", quantize=kind)
    monkeypatch.setattr(lazy_array, "lazy_file", counting)
    lazy = loading.open_weights(network, folder, quantize=kind)
    assert not read_sizes
    placed = ShardedMesh(data=2, fsdp=2, tensor=2).put_state(lazy)
    assert sum(read_sizes) == sum(array.size for array in lazy_file(tmp_path / "model.safetensors").values())
    assert jax.tree.structure(placed) == jax.tree.structure(whole)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed["layers"]))
    for actual, expected in zip(jax.tree.leaves(placed), jax.tree.leaves(whole), strict=True):
        assert actual.dtype == expected.dtype and np.array_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [LoRA(rank=3, alpha=5), LoRA(rank=3, alpha=5, dora=True)], ids=["lora", "dora"])
def test_adapter_gradients_on_a_quantised_base_equal_pefts(folder_of, settings):
    folder = folder_of("llama", "causal")
    base = quantise_on_torch(folder, "causal", "nf4", bnb_4bit_use_double_quant=True)
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", use_dora=settings.dora))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    network = hub.network(load_config(folder), "causal", lora=settings)
    bare = hub.network(load_config(folder), "causal")
    params = adapters.add_adapter(network, loading.load(bare, folder, quantize="nf4"), 0)
    _, frozen = network.split(params)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    trainable = network.from_torch({name: parameter.detach().numpy() for name, parameter in trained.items()})
    batch = batch_of(network.config.vocab_size)

    def loss(trainable):
        params = merge(trainable, frozen)
        return jax.nn.logsumexp(network.logits(params, network.hidden(params, batch)), axis=-1).sum()

    value, gradients = jax.jit(jax.value_and_grad(loss))(trainable)
    expected = model(**{key: torch.from_numpy(part) for key, part in batch.items()}).logits.logsumexp(-1).sum()
    expected.backward()
    assert abs(value - expected.item()) <= 1e-5 * abs(value)
    actual = network.to_torch(gradients)
    assert actual.keys() == trained.keys()
    for name, parameter in trained.items():
        gradient = parameter.grad.numpy()
        assert np.abs(actual[name] - gradient).max() <= 1e-4 * max(np.abs(gradient).max(), 1e-3), name


def test_the_backward_pass_stores_no_dequantised_matrix(folder_of):
    """Autodiff stores activations between the passes, never a dequantised weight of all layers."""
    folder = folder_of("llama", "causal")
    network = hub.network(load_config(folder), "causal", lora=LoRA(rank=2))
    bare = hub.network(load_config(folder), "causal")
    params = adapters.add_adapter(network, loading.load(bare, folder, quantize="nf4"), 0)
    trainable, frozen = network.split(params)
    batch = batch_of(network.config.vocab_size)
    _, pullback = jax.vjp(lambda t: network.hidden(merge(t, frozen), batch), trainable)
    residual_shapes = [leaf.shape for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "shape")]
    layers, matrices = network.arch.num_layers, {leaf.shape for leaf in flatten(frozen).values()
                                                 if isinstance(leaf, quant.Quantized)}
    assert residual_shapes and not {(layers, *shape[1:]) for shape in matrices} & set(residual_shapes)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_codes_are_sharded_like_their_matrices(kind):
    """Each device has its shard of codes and scales; small scales are on all devices."""
    layers = [quantise(np.random.default_rng(n).standard_normal((64, 512), np.float32), kind) for n in range(2)]
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *layers)
    parallel = ShardedMesh(data=1, fsdp=4, tensor=2)
    placed = parallel.put_state({"layers": {"mlp": {"up": {"weight": stacked}}}})["layers"]["mlp"]["up"]["weight"]
    assert [leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(placed)[:2]] == (
        [(2, 8, 256), (2, 8, 8)] if kind == "nf4" else [(2, 8, 512), (2, 64)])
    values = jax.jit(lambda w: w.astype(jnp.float32))(placed)
    assert np.allclose(values, stacked.astype(jnp.float32), rtol=1e-6)
    assert placed.size == stacked.size == 2 * 64 * 512 and str(placed.dtype) == kind


def test_a_damaged_folder_is_an_error():
    state = np.frombuffer(json.dumps({"quant_type": "nf4", "blocksize": 128, "shape": [2, 64]}).encode(), np.uint8)
    arrays = {"weight": np.zeros((64, 1), np.uint8), "weight.absmax": np.ones(2, np.float32)}
    with pytest.raises(UserError, match="saved without weight.quant_state"):
        quant.from_bitsandbytes(arrays)
    arrays |= {"weight.quant_state.bitsandbytes__nf4": state}
    with pytest.raises(UserError, match="blocks of 128"):
        quant.from_bitsandbytes(arrays)
    with pytest.raises(UserError, match="saved without weight.absmax"):
        quant.from_bitsandbytes({name: array for name, array in arrays.items() if name != "weight.absmax"})
    with pytest.raises(UserError, match="saved without weight"):
        quant.from_bitsandbytes({"SCB": np.ones(2, np.float32)})
