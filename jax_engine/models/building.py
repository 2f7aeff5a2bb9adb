"""Build a task's network and its initial parameters: loaded or random, resized to the tokenizer, with adapters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_engine.distributed import devices as machines
from jax_engine.distributed.tree import Path, Tree, flatten, unflatten
from jax_engine.models import hub, loading, quant
from jax_engine.models import lora as adapters
from jax_engine.models.architecture import Head
from jax_engine.models.experts import MATRICES
from jax_engine.models.heads import HEADS
from jax_engine.models.names import LORA_LEAVES
from jax_engine.models.network import Network
from jax_engine.models.quant import ProcessGroup, Quantized
from lmmods.core import hf_config
from lmmods.core.adapters import mismatch_error, quantised_in_full, tokens_to_train
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.experts import note_quantized
from lmmods.core.freezing import check_new_tokens, chosen
from lmmods.core.hardware import Target
from lmmods.core.initialization import mean_row
from lmmods.data.base import DataModule
from lmmods.recipe.tasks.base import Quantize, TaskFields

COMPUTE_DTYPES = {"32-true": "float32", "bf16-true": "bfloat16", "bf16-mixed": "bfloat16"}


def build_network(fields: TaskFields, head: Head, data: DataModule, *, precision: str, seed: int, frozen: bool = False,
                  abstract: bool = False, on: Target | None = None) -> tuple[Network, Tree, Tree]:
    """Return the network that a task's fields describe, and its initial parameters, as lazy arrays.

    The last tree has the base weights of modules that an adapter trains in full; it is empty without an adapter.

    Args:
        precision: Lightning's name.
        seed: Seed of all parameters that are not in files.
        frozen: Nothing trains, so the base may be quantised, and is stored as with an adapter, even without one.
        abstract: Return only shapes and dtypes (jax.ShapeDtypeStruct), for quantised parameters those of their arrays,
            without reading weights.
        on: The `target` of the network.

    Raises:
        UserError: The model cannot be found, read or built, or an adapter does not fit it.
    """
    is_frozen = frozen
    is_causal, compute, frozen = HEADS[head].generates, COMPUTE_DTYPES[precision], frozen or fields.trains_adapter
    # The data determines some fields, such as label names.
    overrides = {**(fields.overrides or {}), **data.network_fields}
    config = hf_config.load_config(fields.pretrained or fields.config, overrides, fields.revision,
                                   defaults=hf_config.vocabulary_fields(data.tokenizer, is_causal),
                                   all_parts=fields.all_parts)
    if fields.all_parts and config.model_type not in (types := hub.list_image_types()):
        raise UserError(f"model.images: the JAX engine cannot train a model of type {config.model_type} on images. Use "
                        f"engine: torch, or one of the types {', '.join(types)}.", "model.images", "engine")
    skipped = hf_config.parts_left_out(fields.pretrained, fields.revision
                                       ) if fields.pretrained and not fields.all_parts else []
    if skipped:
        say(hf_config.text_note(fields.pretrained, skipped, config.model_type))
    saved = hf_config.saved_quantization(config)
    hf_config.check_saved_quantization(saved, fields.pretrained, fields.quantize, frozen)
    in_files = saved not in (None, hf_config.MXFP4)
    note_quantized(config, saved if in_files else fields.quantize, in_files)
    remat = {False: "none", True: "full"}.get(fields.gradient_checkpointing, fields.gradient_checkpointing)
    network = hub.network(config, head, compute_dtype=compute, remat=remat, fast_kernels=fields.fast_kernels,
                          attention=fields.attention if fields.fast_kernels else "eager", on=on,
                          noise=0.0 if is_frozen else fields.neftune_alpha or 0.0)
    # Mixed precision trains float32 parameters; frozen ones are stored as they are used.
    stored = compute if frozen or precision == "bf16-true" else "float32"
    principal = None
    if fields.lora and fields.lora.is_principal and not abstract:
        principal = adapters.PrincipalParts(network, fields.lora, adapters.adapted_paths(network, fields.lora))
    if abstract:
        params = {}
    elif fields.pretrained:
        # Each process reads only the shards of its devices, and computes a part of the scales.
        processes = ProcessGroup(jax.process_index(), jax.process_count(), machines.gather)
        params = loading.open_weights(network, fields.pretrained, fields.revision, stored, seed,
                                      None if in_files else fields.quantize, fields.double_quant, processes, principal)
    elif network.arch.images is not None and not network.arch.images.may_start_random:
        raise UserError(f"model.config: the JAX engine has no initial weights of {config.model_type} with images. Set "
                        "model.pretrained, or use engine: torch.", "model.config")
    else:
        params = network.initial_values(seed, stored)
    num_rows = network.arch.vocab_size
    if len(data.tokenizer) > num_rows:
        say(hf_config.new_rows_message(len(data.tokenizer), num_rows))
        network.resize(len(data.tokenizer))
        params = _add_rows(network, params)
    kind = saved if in_files else fields.quantize
    quantisation = kind, fields.double_quant if saved is None else hf_config.is_double_quantized(config), in_files
    hf_config.set_special_ids(network.config, data.tokenizer, is_causal)
    if fields.freezes:
        network.train_only(chosen(network.all_names(), fields.trainable_parameters, fields.frozen_parameters))
        check_new_tokens(tokens_to_train(data, num_rows), network.trains(("embed", "tokens", "weight")))
    if not fields.trains_adapter:
        return network, outline(network, stored, precision, *quantisation) if abstract else params, {}
    if fields.lora:
        adapters.adapt(network, fields.lora,
                       adapters.trainable_rows(network, fields.lora, tokens_to_train(data, num_rows)))
    else:
        settings = adapters.adapter_settings(fields.adapter, network)
        if not fields.adapter_has_dropout:
            settings = dataclasses.replace(settings, dropout=0.0)
        rows = adapters.adapter_rows(network, settings, fields.adapter)
        try:
            adapters.adapt(network, settings, rows)
        except UserError as error:  # its message names a key that is not in the recipe
            raise mismatch_error(fields.adapter, error) from error
    if abstract:
        params = outline(network, stored, precision, *quantisation)
        return network, params, unflatten({path: leaf for path, leaf in flatten(params).items()
                                           if network.trains(path) and path[-1] not in LORA_LEAVES})
    return network, *_add_adapter(network, params, fields.adapter, precision, seed, principal)


def outline(network: Network, stored: str, precision: str, quantize: Quantize | None = None, double: bool = True,
            keeps_experts: bool = False) -> Tree:
    """Return the shape and dtype of each parameter at the start of training.

    Args:
        stored: Dtype of frozen parameters with an adapter, and of all parameters without one.
        quantize: Quantisation of the base.
        double: The scales of 4-bit codes are also quantised.
        keeps_experts: Experts are not quantised, as in files that are saved quantised.
    """
    in_codes = network.quantised(quantize)
    if keeps_experts:
        in_codes = {path for path in in_codes if path[-1] not in MATRICES}

    def leaf(path: Path, shape: tuple[int, ...]) -> Any:
        if path in in_codes and not (network.lora and network.trains(path)):
            return quant.outline(shape, quantize, double, network.arch.conv1d, path[-1] in MATRICES)
        return jax.ShapeDtypeStruct(shape, _dtype(network, path, stored, precision))

    return unflatten({path: leaf(path, shape.shape) for path, shape in flatten(network.shapes).items()})


def _dtype(network: Network, path: Path, stored: str, precision: str) -> np.dtype:
    """Return a parameter's dtype, as in torch: float32 if it trains or is a norm of a bfloat16 base."""
    if network.lora and network.trains(path):
        stored = "bfloat16" if precision == "bf16-true" else "float32"
    elif network.lora and precision == "bf16-mixed" and any("norm" in name for name in path):
        stored = "float32"
    return jnp.dtype(stored)


def _add_rows(network: Network, params: Tree) -> Tree:
    """Extend the parameters to the rows of a resized network; each new row is the mean of the existing ones."""
    leaves, shapes = flatten(params), flatten(network.shapes)
    for path, leaf in leaves.items():
        missing = shapes[path].shape[0] - leaf.shape[0] if leaf.ndim else 0
        if missing:
            leaf = np.asarray(leaf)
            leaves[path] = np.concatenate(
                [leaf, *[mean_row(leaf.astype(np.float32)).astype(leaf.dtype)] * missing])
    return unflatten(leaves)


def _add_adapter(network: Network, base: Tree, folder: str | None, precision: str, seed: int,
                 principal: adapters.PrincipalParts | None) -> tuple[Tree, Tree]:
    """Return the base with an adapter, new or from a folder, and the base weights of modules trained in full."""
    for path, leaf in flatten(base).items():
        if isinstance(leaf, Quantized) and network.trains(path):
            raise UserError(quantised_in_full(network.torch_modules(".".join(path[:-1]))[0], leaf.kind))
    leaves = flatten(adapters.add_adapter(network, base, seed, principal))
    base_weights = {path: leaf for path, leaf in leaves.items() if network.trains(path) and path[-1] not in LORA_LEAVES}
    if folder is not None:
        leaves |= flatten(adapters.load_adapter(network, folder))
    for path, leaf in leaves.items():
        if not isinstance(leaf, Quantized) and leaf.dtype != (dtype := _dtype(network, path, leaf.dtype, precision)):
            leaves[path] = leaf.astype(dtype)
    if principal is not None:
        # Copy, because a step may overwrite the arrays of the parameters.
        network.first_factors = {path: leaf.copy() for path, leaf in leaves.items() if path[-1] in LORA_LEAVES}
    dtype_name = "bfloat16" if precision == "bf16-true" else "float32"
    return unflatten(leaves), unflatten({path: leaf.astype(dtype_name) for path, leaf in base_weights.items()})
