"""Hugging Face folders in and out: configurations, weights, networks."""

import copy
import importlib
import json
import pkgutil
import re
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from jax_engine import lora as adapters
from jax_engine import quant
from jax_engine.models import families
from jax_engine.models.architecture import Family, Head, refuse
from jax_engine.models.linear import Build
from jax_engine.models.names import some
from jax_engine.models.network import Network, Tree
from jax_engine.quant import SAVED, Quantize, Quantized, from_bitsandbytes
from jax_engine.state import Path as LeafPath
from jax_engine.state import flatten, unflatten
from lmmods.console import say
from lmmods.errors import UserError
from lmmods.fresh import fresh_weight
from lmmods.settings import LoRA

SHARD_BYTES = 5 * 10**9
PREFIXES = ("transformer.", "model.", "bert.", "roberta.", "albert.", "distilbert.")
# Buffers of older transformers versions: recomputed, never weights.
BUFFERS = re.compile(r"(^|\.)(attn\.(masked_)?bias|position_ids|token_type_ids|rotary_emb\.inv_freq|pos_encoding)$")
# Heads of other tasks and poolers, which the networks here do not have.
OTHER_HEADS = re.compile(r"^(pooler|cls|lm_head|qa_outputs|predictions|sop_classifier|vocab_transform|vocab_projector|"
                         r"vocab_layer_norm|classifier|pre_classifier|score|multiple_choice_head)\.")


def load_config(name: str | dict[str, Any], overrides: dict[str, Any] | None = None, revision: str | None = None
                ) -> PreTrainedConfig:
    """Configuration from a folder, a hub id, or `{model_type: llama, ...}`, with fields changed by `overrides`.

    Raises:
        UserError: Nothing there, or an unknown type or field.
    """
    overrides = overrides or {}
    if isinstance(name, dict):
        fields = {**name, **overrides}
        model_type = fields.pop("model_type", None)
        if model_type not in CONFIG_MAPPING:
            raise UserError(f"model.config.model_type is {model_type!r}, which transformers does not know. "
                            f"The JAX engine supports: {', '.join(supported())}.")
        _check_fields(CONFIG_MAPPING[model_type](), fields)
        return CONFIG_MAPPING[model_type](**fields)  # not set one by one: sizes of heads follow from the others
    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise UserError(f"model.pretrained: {name} holds no config.json, so it is not a model folder. "
                        "Name a folder written by save_pretrained, or a hub id.")
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.pretrained: there is no folder {name!r}, and as a hub id it cannot be loaded: "
                        f"{str(error).strip().splitlines()[0]}") from error
    _check_fields(config, overrides)
    for field, value in overrides.items():
        setattr(config, field, value)
    return config


def _check_fields(config: PreTrainedConfig, fields: dict[str, Any]) -> None:
    for name in fields:
        if not hasattr(config, name):
            raise UserError(f"model.config: {type(config).__name__} has no field {name!r}.")


def supported() -> list[str]:
    """Names of the supported architectures, as in `model_type`."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(families.__path__))


def family_of(config: PreTrainedConfig, head: Head) -> Family:
    """The family of a configuration; UserError where it is not supported with this head."""
    if config.model_type not in supported():
        raise UserError(f"model: the architecture {config.model_type!r} is not supported by the JAX engine. "
                        f"Supported: {', '.join(supported())}. Use engine: torch.")
    family = importlib.import_module(f"{families.__name__}.{config.model_type.replace('-', '_')}").FAMILY
    if head not in family.classes:
        able = [name for name in supported()
                if head in importlib.import_module(f"{families.__name__}.{name.replace('-', '_')}").FAMILY.classes]
        raise UserError(f"model: the JAX engine has no {head} head for {config.model_type!r}. With this head it "
                        f"supports: {', '.join(able)}.")
    return family


def network(config: PreTrainedConfig, head: Head, *, compute_dtype: str = "float32", lora: LoRA | None = None,
            remat: Literal["none", "minimal", "full"] = "none", unroll: int = 1) -> Network:
    """The network of a configuration; makes no arrays.

    Args:
        compute_dtype: Of matrix products; norms, softmax, rotary positions and logits stay in float32.
        lora: Adapters on a base that does not train.
        remat: See Network.
        unroll: Layers per step of the scan.

    Raises:
        UserError: An unsupported architecture, head or field, or adapter targets that match nothing.
    """
    family = family_of(config, head)
    saved_kind(config)
    refuse(config, **({"num_labels": 2} if head == "qa" else {}))
    arch = family.architecture(config)
    dtype = jnp.dtype(compute_dtype)
    bare = Network(config, family, arch, head, Build(dtype), remat=remat, unroll=unroll)
    if lora is None:
        return bare
    return adapters.adapt(bare, lora)


def saved_kind(config: PreTrainedConfig) -> Quantize | None:
    """In which code a folder keeps its linear layers; None where they are plain numbers.

    Raises:
        UserError: A code other than those of bitsandbytes.
    """
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return None
    method = saved.get("quant_method", "bitsandbytes")
    if method != "bitsandbytes":
        raise UserError(f"model.pretrained: its weights are quantised with {method}. The JAX engine reads those of "
                        "bitsandbytes: use engine: torch, or a model that is not quantised.")
    return "int8" if saved.get("load_in_8bit") else saved["bnb_4bit_quant_type"]


def load(network: Network, folder: str, revision: str | None = None, dtype: str = "float32", seed: int = 0,
         quantize: Quantize | None = None, double_quant: bool = True) -> Tree:
    """Weights of a folder or hub id as numpy arrays, with fresh adapters where the network has them.

    Strict: every leaf is filled once, and every key of the files is consumed, tied, or known not to be needed. A head
    that a base model lacks starts at random and is reported.

    Args:
        dtype: Of all weights.
        seed: Of what starts at random.
        quantize: Keep linear layers in this code, layer by layer, so that the whole model is never there in full.
        double_quant: Quantise the scales of 4-bit codes too.

    Raises:
        UserError: Keys that are missing, left over, or of another shape.
    """
    dtype = jnp.dtype(dtype)
    leaves: dict[LeafPath, np.ndarray] = {}
    filled: set[tuple[LeafPath, int | None]] = set()
    wanted = _wanted(network)
    copies: dict[str, tuple[LeafPath, np.ndarray]] = {}
    linear = {(*ours.split("."), "weight") for ours in network.linears()}
    quantised: dict[LeafPath, dict[int | None, Quantized]] = {}
    saved: dict[tuple[LeafPath, int | None], dict[str, np.ndarray]] = {}
    problems, dropped = [], []
    for key, read in _open(folder, revision):
        if part := SAVED.match(key):
            if slot := _match(f"{part[1]}.weight", wanted, network):
                saved.setdefault(slot[:2], {})[part[2]] = read()
            continue
        slot = _match(key, wanted, network)
        if slot is None:
            (dropped if _needless(key) else problems).append(key)
            continue
        path, layer, tied = slot
        value = read()
        if path in linear and value.dtype in (np.uint8, np.int8):
            saved.setdefault((path, layer), {})["weight"] = value
        elif value.shape != network.shape(path):
            problems.append(f"{key} {value.shape} (the configuration says {network.shape(path)})")
        elif tied:
            copies[key] = (path, value)
        elif (path, layer) in filled:
            problems.append(f"{key} (a second time)")
        else:
            if quantize and path in linear:
                quantised.setdefault(path, {})[layer] = quant.quantize(value.astype(dtype), quantize, double_quant,
                                                                       network.arch.conv1d)
            else:
                _put(leaves, network, path, layer, value, dtype)
            filled.add((path, layer))
    for (path, layer), parts in saved.items():
        quantised.setdefault(path, {})[layer] = from_bitsandbytes(parts, network.arch.conv1d)
        filled.add((path, layer))
    for path, value in copies.values():
        if (path, None) not in filled:
            _put(leaves, network, path, None, value, dtype)
            filled.add((path, None))
    if network.head == "causal" and network.config.tie_word_embeddings and not network.arch.tied:
        # An adapter trains one of the two apart, so the other needs a leaf of its own.
        leaves["head", "weight"] = leaves["embed", "tokens", "weight"].copy()
        filled.add((("head", "weight"), None))
    missing = {name: (path, layer) for name, path, layer in network.names(plain=True) if (path, layer) not in filled}
    headless = {name for name, (path, _) in missing.items() if path[0] == "head"}
    whole_head = {name for name, path, _ in network.names(plain=True) if path[0] == "head"}
    if headless == whole_head:
        missing = {name: slot for name, slot in missing.items() if name not in headless}
    if missing or problems:
        raise UserError(f"{folder} does not fit {network.config.model_type} with the {network.head} head. "
                        f"Missing: {some(sorted(missing)) or 'nothing'}. "
                        f"Not expected: {some(sorted(problems)) or 'nothing'}.")
    for key, (path, value) in copies.items():
        if not np.array_equal(leaves[path], value.astype(dtype)):
            raise UserError(f"{folder}: {key} differs from the weight that it is tied to: set tie_word_embeddings: "
                            "false in its config.json.")
    leaves |= {path: parts[None] if None in parts else jax.tree.map(
        lambda *layers: np.stack(layers), *(parts[layer] for layer in range(network.arch.num_stored_layers)))
               for path, parts in quantised.items()}
    if others := [key for key in dropped if not BUFFERS.search(key)]:
        say(f"Not needed from {folder}: {some(others)}.")
    if headless:
        say(f"{folder} has no {network.head} head: {some(sorted(headless))} start at random.")
    tree = unflatten(leaves)
    if headless:
        fresh = jax.device_get(jax.jit(lambda key: network.init(key)["head"])(jax.random.key(seed)))
        leaves = {("head", *path): np.asarray(leaf) for path, leaf in flatten(fresh).items()}
        for name, path, _ in network.names(plain=True):
            if name in headless and "norm" not in ".".join(path):
                std = getattr(network.config, "initializer_range", 0.02)
                leaves[path] = fresh_weight(seed, name, network.shape(path), std)
        tree = unflatten(flatten(tree) | {path: leaf.astype(dtype) for path, leaf in leaves.items()})
    return adapters.add_fresh(network, tree, seed) if network.lora else tree


def _wanted(network: Network) -> dict[str, tuple[LeafPath, int | None, bool]]:
    """Every key that a file may have: its leaf, layer, and whether it is a tied copy."""
    wanted = {name: (path, layer, False) for name, path, layer in network.names(plain=True)}
    for name, ours in network.family.tied.get(network.head, {}).items():
        if name not in wanted:
            wanted[name] = (tuple(ours.split(".")), None, True)
    return wanted


def _match(key: str, wanted: dict[str, tuple], network: Network) -> tuple[LeafPath, int | None, bool] | None:
    """The slot of a key, in today's spelling or an older one: gamma and beta, another prefix of the base or none."""
    key = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", key))
    bare = next((key.removeprefix(prefix) for prefix in PREFIXES if key.startswith(prefix)), key)
    base = network.family.prefix(network.head)
    return next((wanted[name] for name in (key, f"{base}.{bare}", f"{base}.{key}") if name in wanted), None)


def _needless(key: str) -> bool:
    bare = next((key.removeprefix(prefix) for prefix in PREFIXES if key.startswith(prefix)), key)
    return bool(BUFFERS.search(key) or OTHER_HEADS.match(key) or OTHER_HEADS.match(bare))


def _put(leaves: dict[LeafPath, np.ndarray], network: Network, path: LeafPath, layer: int | None, value: np.ndarray,
         dtype: np.dtype) -> None:
    if layer is None:
        leaves[path] = value.astype(dtype)
        return
    if path not in leaves:  # filled layer by layer, so that the peak is one copy
        leaves[path] = np.empty((network.arch.num_stored_layers, *network.shape(path)), dtype)
    leaves[path][layer] = value


def _open(folder: str, revision: str | None):
    """Yield (key, function that reads it) of every tensor of a folder or hub id."""
    folder = _local(folder, revision)
    files = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    if lost := [file.name for file in files if not file.is_file()]:
        raise UserError(f"{folder}: {index.name} names files that are not there: {some(lost)}.")
    for file in files:
        with safe_open(file, "numpy") as tensors:
            for key in tensors.keys():
                yield key, lambda tensors=tensors, key=key: tensors.get_tensor(key)
    if not files:
        yield from _open_pickled(folder)


def _open_pickled(folder: Path):
    files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise UserError(f"{folder} holds neither model*.safetensors nor pytorch_model*.bin: it has no weights.")
    # The only use of torch in this engine: nothing else reads its pickles safely. Imported only for such a folder.
    torch = importlib.import_module("torch")
    for file in files:
        for key, tensor in torch.load(file, map_location="cpu", weights_only=True, mmap=True).items():
            yield key, lambda tensor=tensor: (tensor.contiguous().view(torch.int16).numpy().view(jnp.bfloat16)
                                              if tensor.dtype == torch.bfloat16 else tensor.numpy())


def _local(folder: str, revision: str | None) -> Path:
    if Path(folder).is_dir():
        return Path(folder)
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(folder, revision=revision, allow_patterns=["model*.safetensors*"]))
        if not list(path.glob("model*.safetensors")):
            path = Path(snapshot_download(folder, revision=revision, allow_patterns=["pytorch_model*.bin"]))
    except (OSError, ValueError) as error:
        raise UserError(f"model.pretrained: there is no folder {folder!r}, and as a hub id it cannot be loaded: "
                        f"{str(error).strip().splitlines()[0]}") from error
    return path


def save(network: Network, params: Tree, folder: str | Path, dtype: str | None = None) -> None:
    """Write config.json and safetensors of at most 5 GB that transformers loads with from_pretrained.

    Args:
        params: Whole tree; adapters in it are left out (see `jax_engine.lora` for them).
        dtype: Of the written weights; None keeps theirs.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = network.to_torch(params, plain=True)
    if dtype is not None:
        tensors = {name: value.astype(jnp.dtype(dtype)) for name, value in tensors.items()}
    write_shards(tensors, folder)
    config = copy.deepcopy(network.config)
    config.architectures = [network.family.classes[network.head]]
    config.dtype = str(next(iter(tensors.values())).dtype)
    config.save_pretrained(folder)


def write_shards(tensors: dict[str, np.ndarray], folder: Path, limit: int = SHARD_BYTES) -> None:
    """Write `model.safetensors`, or numbered parts of at most `limit` bytes with their index."""
    shards: list[dict[str, np.ndarray]] = [{}]
    room = limit
    for name, value in tensors.items():
        if value.nbytes > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = np.ascontiguousarray(value)  # others are written as garbage, without a word
        room -= value.nbytes
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(value.nbytes for value in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
