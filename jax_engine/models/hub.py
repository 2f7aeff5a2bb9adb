"""Networks from Hugging Face configurations, and models saved as Hugging Face folders."""

import copy
import importlib
import json
import pkgutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from transformers import CONFIG_MAPPING, PreTrainedConfig

from jax_engine.distributed.target import target
from jax_engine.distributed.tree import Tree
from jax_engine.models import expert_files, families, fused
from jax_engine.models import lora as adapters
from jax_engine.models.architecture import Classifier, Family, Head
from jax_engine.models.heads import HEADS
from jax_engine.models.linear import Build
from jax_engine.models.network import Network, Remat
from lmmods.core.errors import UserError
from lmmods.core.hardware import Target
from lmmods.core.hf_config import MXFP4, saved_quantization
from lmmods.core.memory import MLP_CHUNK
from lmmods.core.settings import LoRA

SHARD_BYTES = 5 * 10**9


def list_supported() -> list[str]:
    """Return the supported architectures of text networks, by `model_type`."""
    return [name for name in _list_families() if not _reads_images(name)]


def list_image_types() -> list[str]:
    """Return the `model_type`s of the supported networks that read images."""
    return [name for name in _list_families() if _reads_images(name)]


def _list_families() -> list[str]:
    modules = {module.name for module in pkgutil.iter_modules(families.__path__)}
    return sorted(name for name in CONFIG_MAPPING if _module(name) in modules)


def _reads_images(model_type: str) -> bool:
    return "images.patches" in _family(model_type).modules


def _module(model_type: str) -> str:
    return model_type.replace("-", "_")


def _family(model_type: str) -> Family:
    return importlib.import_module(f"{families.__name__}.{_module(model_type)}").FAMILY


def find_family(config: PreTrainedConfig, head: Head) -> Family:
    """Return the family of a configuration; raise UserError if it, or this head of it, is not supported."""
    if config.model_type not in (*list_supported(), *list_image_types()):
        raise UserError(f"model: the architecture {config.model_type!r} is not supported by the JAX engine. Use "
                        f"engine: torch, or one of {', '.join(list_supported())}.")
    family = _family(config.model_type)
    if head not in family.classes:
        supported = [name for name in list_supported() if head in _family(name).classes]
        raise UserError(f"model: the JAX engine has no {head} head for {config.model_type!r}. Use engine: torch, or "
                        f"one of {', '.join(supported)}.")
    return family


def network(config: PreTrainedConfig, head: Head, *, compute_dtype: str = "float32", lora: LoRA | None = None,
            rows: dict[str, list[int]] | None = None, remat: Remat = "none",
            unroll: int | None = None, fast_kernels: bool = True, attention: str | None = None,
            on: Target | None = None, noise: float = 0.0) -> Network:
    """Return the network of a configuration, without creating arrays.

    Args:
        compute_dtype: Dtype of matrix products; norms, softmax, rotary positions and logits stay in float32.
        lora: Adapters on a frozen base.
        rows: Tokens with rows that train alongside the adapters, by torch's name of their table.
        remat: See Network.
        unroll: See Network; without adapters only.
        fast_kernels: Use the implementations that are fast on the target.
        attention: The recipe's choice; `eager` is unfused attention.
        on: The `target`.
        noise: `TaskFields.neftune_alpha`; 0 adds none.

    Raises:
        UserError: An architecture, head or field is not supported, or adapter targets match nothing.
    """
    family = find_family(config, head)
    kind = saved_quantization(config)
    if kind not in (None, "nf4", "fp4", "int8", MXFP4):
        raise UserError(f"model.pretrained: its weights are quantised with {kind}, but the JAX engine supports only "
                        "bitsandbytes and MXFP4. Use engine: torch, or a model that is not quantised.")
    arch = family.architecture(config)
    if not HEADS[head].vocabulary:
        classifier = family.classifiers.get(head, lambda config: Classifier())(config)
        arch = replace(arch, classifier=replace(classifier, size=HEADS[head].num_scores(config)))
    cpu_forms = fast_kernels and target(on).platform == "cpu"
    blocked = cpu_forms or fused.is_replaced_by_blocks(arch, compute_dtype, attention, on)
    build = Build(jnp.dtype(compute_dtype), cpu_forms=cpu_forms, attention=attention,
                  blocked=attention != "eager" and blocked, cut=arch.init_cut, on=on, noise=noise,
                  mlp_chunk=MLP_CHUNK if remat == "offload" else 0,
                  experts="dense" if not fast_kernels else "blocks" if cpu_forms else "ragged")
    result = Network(config, family, arch, head, build, remat=remat, unroll=unroll)
    if lora is not None:
        adapters.adapt(result, lora, rows or {})
    return result


def save(network: Network, params: Tree, folder: str | Path, dtype: str | None = None) -> None:
    """Write config.json and safetensors files of at most 5 GB, for transformers' from_pretrained.

    Args:
        params: Whole tree; adapters are not written (see `jax_engine.models.lora`).
        dtype: Dtype of the written weights; None keeps each weight's dtype.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = expert_files.split_experts(network.family, network.to_torch(params, plain=True))
    tensors = {file_name(network.family, name): value for name, value in tensors.items()}
    if dtype is not None:
        tensors = {name: value.astype(jnp.dtype(dtype)) for name, value in tensors.items()}
    write_shards(tensors, folder)
    config = copy.deepcopy(network.config)
    if saved_quantization(config) == MXFP4:
        del config.quantization_config  # the written weights are not quantised
    config.architectures = [network.family.classes[network.head]]
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = str(next(iter(tensors.values())).dtype)
    config.save_pretrained(folder)


def file_name(family: Family, name: str) -> str:
    """Return a parameter's name in files."""
    return next((prefix + name.removeprefix(current) for prefix, current in family.in_files.items()
                 if name.startswith(current)), name)


def write_shards(tensors: dict[str, np.ndarray], folder: Path, limit: int = SHARD_BYTES) -> None:
    """Write `model.safetensors`, or numbered files of at most `limit` bytes with their index."""
    shards: list[dict[str, np.ndarray]] = [{}]
    bytes_left = limit
    for name, value in tensors.items():
        # A tensor larger than the limit gets a separate file.
        if value.nbytes > bytes_left and shards[-1]:
            shards.append({})
            bytes_left = limit
        shards[-1][name] = np.ascontiguousarray(value)  # safetensors silently corrupts other arrays
        bytes_left -= value.nbytes
    # Delete files of an earlier export: with other numbers, they would be loaded as well.
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(value.nbytes for value in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
