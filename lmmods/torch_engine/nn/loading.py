"""Load a network from a folder or hub id, with dtypes, quantisation, missing weights and rows for new tokens."""

import contextlib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Mxfp4Config, PreTrainedConfig

from lmmods.core import hub
from lmmods.core.adapters import ANSWER_HEADS, adapter_config, check_weights, reading_weights
from lmmods.core.console import say, warn
from lmmods.core.errors import UserError
from lmmods.core.experts import note_quantized
from lmmods.core.hf_config import (
    MXFP4,
    TEXT_NAMES,
    check_saved_quantization,
    load_config,
    loading_notes,
    new_rows_message,
    parts_left_out,
    saved_quantization,
    text_name,
    text_note,
)
from lmmods.core.image_models import is_of_language_model
from lmmods.core.initialization import mean_row
from lmmods.core.lazy_array import LazyArray
from lmmods.recipe.tasks.base import Quantize
from lmmods.torch_engine.compat.bitsandbytes import (
    multiply_by_matrices,
    packed_outline,
    packed_weight,
    patch_cpu_kernels,
)
from lmmods.torch_engine.compat.torch import disable_moving
from lmmods.torch_engine.compat.transformers import (
    defer_weights,
    layers_to_quantize,
    quantising,
    quiet_loading,
    replace_truncated_normals,
)
from lmmods.torch_engine.nn.attention import attention_errors
from lmmods.torch_engine.nn.classifier import NEW_HEADS, head_modules
from lmmods.torch_engine.nn.experts import is_stacked, pack
from lmmods.torch_engine.nn.initialization import init_missing_weights
from lmmods.torch_engine.nn.quantizing import quantize_in_chunks
from lmmods.torch_engine.nn.stored import Codes, cast, defer_codes, defer_weight, read_values

COMPUTE_DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16,
                  "16-mixed": torch.float16}


def load_pretrained(auto_class: type, pretrained: str, *, overrides: dict[str, Any] | None = None,
                    revision: str | None = None, trust_remote_code: bool = False, quantize: Quantize | None = None,
                    double_quant: bool = True, quant_storage: str | None = None, precision: str = "32-true",
                    frozen: bool = False, attention: str | None = None, device: torch.device | None = None,
                    max_memory: str | dict[int | str, str] | None = None, seed: int = 0, by_parts: bool = False,
                    abstract: bool = False, before_quantising: Callable[[nn.Module, str, Any], Any] | None = None,
                    adapter: str | Path | None = None, all_parts: bool = False) -> nn.Module:
    """Load weights, quantised or not, in the dtypes of the precision, in training mode.

    A frozen base is stored in the compute dtype with its norms in float32; a trained one in float32 under mixed
    precision. from_pretrained returns eval mode, in which Lightning would train without dropout and without gradient
    checkpointing.

    Args:
        quantize: 4-bit or 8-bit weights of all linear layers except the output head (bitsandbytes); in 4 bits also
            of stacked experts.
        precision: Lightning's name of the precision.
        frozen: The base itself does not train.
        device: Device on which weights are quantised.
        max_memory: Spread the model over this machine's GPUs within these limits; see `placement`.
        seed: Seed of weights that the checkpoint lacks.
        by_parts: Use placeholders, whose rows each process reads later; see `stored`.
        abstract: Build the same network from its configuration alone, with arbitrary values; no weights are read.
        before_quantising: Replaces the weight of a linear layer before it is quantised to 4 bits; see `quantising`.
        adapter: Folder of the adapter that is loaded next. Modules that it contains in full are not reported as random.
        all_parts: Load the whole checkpoint, not only its text model; only the text model is quantised.

    Raises:
        UserError: The model cannot be found or read, or its files are quantised in a way that `abstract` cannot build.
    """
    compute = COMPUTE_DTYPES[precision]
    # Mixed precision computes with 16-bit copies of trained weights; their float32 values accumulate small updates.
    storage_dtype = compute if frozen or precision.endswith("true") else torch.float32
    if trust_remote_code:
        warn(f"trust_remote_code is on: Python code of {pretrained} will run on this machine.")
    config = load_config(pretrained, overrides, revision, trust_remote_code, all_parts=all_parts)
    if left_out := [] if all_parts else parts_left_out(pretrained, revision, trust_remote_code):
        say(text_note(pretrained, left_out, config.model_type))
    has_answer_head = auto_class.__name__ == "AutoModelForQuestionAnswering"
    has_new_head = auto_class.__name__.endswith(NEW_HEADS)
    # A new head is fully trained; by default transformers only leaves vocabulary heads unquantised.
    skip = list(ANSWER_HEADS) if has_answer_head else None
    if has_new_head and quantize:
        with torch.device("meta"):
            skip = head_modules(auto_class.from_config(config, trust_remote_code=trust_remote_code))
    if all_parts and quantize:
        with torch.device("meta"):
            outline = auto_class.from_config(config, trust_remote_code=trust_remote_code)
        skip = [name for name, module in outline.named_modules() if name and not is_of_language_model(name)
                and not any(is_of_language_model(f"{name}.{part}") for part, _ in module.named_modules())]
        skip.append("lm_head")
    saved = saved_quantization(config)
    check_saved_quantization(saved, pretrained, quantize, frozen)
    is_packed = saved not in (None, MXFP4)
    # bitsandbytes quantises weights on their device.
    options: dict[str, Any] = {"device_map": {"": device or "cpu"}} if quantize or is_packed else {}
    if max_memory is not None:
        options = placement(max_memory)
    if quantize and not is_packed:
        options["quantization_config"] = _quantization(quantize, double_quant, quant_storage or "uint8", compute, skip)
    if saved == MXFP4 and not quantize:
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    elif saved == MXFP4:
        del config.quantization_config  # the dequantised weights are quantised again, by bitsandbytes
    if abstract:
        if is_packed:
            raise UserError(f"plan: {pretrained} is saved in {saved}, which cannot be planned on torch. Set "
                            "model.pretrained to the unquantised model, and set model.quantize.")
        return _build_outline(auto_class, config, storage_dtype, attention, trust_remote_code,
                              options.get("quantization_config"),
                              frozen and precision != "bf16-true")
    names = (TEXT_NAMES if left_out else {}) | (base_names(config) if has_answer_head else {})
    options |= {"key_mapping": names} if names else {}
    options |= {"ignore_mismatched_sizes": True} if has_new_head else {}
    if quantize in ("nf4", "fp4"):
        quantize_in_chunks()
    check_weights(pretrained)
    with (reading_weights(pretrained), hub.loading("model.pretrained", pretrained, revision=revision),
          attention_errors(attention), init_missing_weights(seed), quiet_loading(),
          _reading(by_parts and saved != "int8", pretrained, device or torch.device("cpu")),
          quantising(is_stacked, saved == MXFP4, functools.partial(_codes, device=device),
                     before_quantising) as states):
        try:
            model, info = auto_class.from_pretrained(
                pretrained, config=config, revision=revision, dtype=storage_dtype, trust_remote_code=trust_remote_code,
                attn_implementation=attention, output_loading_info=True, **options)
        except (ValueError, RuntimeError) as error:
            if max_memory is not None and "dispatched on the CPU or the disk" in str(error):  # by bitsandbytes
                raise no_room(max_memory) from error
            raise
    # A head for other labels is initialised again; other weights with a different shape mean wrong files.
    resized = {name for name, *_ in info.get("mismatched_keys") or ()}
    info["missing_keys"] = {*info["missing_keys"], *resized}
    # Missing weights of the base mean wrong files; those of a new head are normal and reported below.
    base, heads = f"{model.base_model_prefix}.", head_modules(model) if has_new_head else []
    if missing := sorted(name for name in info["missing_keys"] if (name in resized or name.startswith(base))
                         and not any(name.startswith(f"{head}.") for head in heads)):
        raise UserError(f"model.pretrained: {pretrained} lacks {len(missing)} weights of {type(model).__name__}, for "
                        f"example {', '.join(missing[:3])}. Its config.json describes another architecture, or the "
                        "download is incomplete. Download it again.")
    unneeded = [name for name in info["unexpected_keys"] if not left_out or text_name(name) is not None]
    in_adapter = adapter_config(adapter).get("modules_to_save") or [] if adapter else []
    missing = [name for name in info["missing_keys"] if not any(f".{module}." in f".{name}" for module in in_adapter)]
    for line in loading_notes(pretrained, missing, unneeded):
        say(line)
    note_quantized(config, saved if is_packed else quantize, in_files=is_packed)
    pack(model, states)
    patch_cpu_kernels(model)
    multiply_by_matrices(model)
    if max_memory is not None:
        keep_in_place(model, max_memory)
    model.maps_names = bool(names) or saved == MXFP4  # read by `export.save`
    if is_packed:  # from_pretrained keeps the saved dtype of other weights in a quantised folder
        for param in model.parameters():
            if type(param) is nn.Parameter and param.is_floating_point():
                cast(param, storage_dtype)
    if frozen and precision != "bf16-true":
        _norms_to_float32(model)
    if (quantize or is_packed) and not by_parts:
        _unmap_files(model)
    return model.train()


def _unmap_files(model: nn.Module) -> None:
    """Copy weights that were not quantised: as views of the mapped file, they would keep all of it in memory."""
    for param in model.parameters():
        if type(param) is nn.Parameter and param.device.type == "cpu":
            param.data = param.data.clone()


def _build_outline(auto_class: type, config: PreTrainedConfig, dtype: torch.dtype, attention: str | None, trust: bool,
                   quantization: Any, float32_norms: bool) -> nn.Module:
    """Build the network from its configuration, with arbitrary values."""
    # Without values, sampling until all of them are inside the bounds would never end.
    with attention_errors(attention), replace_truncated_normals(lambda *_: None):
        model = auto_class.from_config(config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust)
    if quantization is not None and hasattr(quantization, "bnb_4bit_quant_type"):
        # Do without values what from_pretrained's quantiser does when it reads weights.
        for name in layers_to_quantize(model, quantization.llm_int8_skip_modules):
            layer = model.get_submodule(name)
            weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()  # Conv1D has [in, out]
            model.set_submodule(name, packed_outline(layer, weight, quantization))
        states = {}
        # Stacked experts, which bitsandbytes does not quantise.
        for name, parameter in list(model.named_parameters()):
            if is_stacked(name, parameter):
                path, _, leaf = name.rpartition(".")
                codes, states[name] = packed_weight(parameter, quantization)
                setattr(model.get_submodule(path), leaf, codes)
        pack(model, states)
    if float32_norms:
        _norms_to_float32(model)
    return model.train()


def _norms_to_float32(model: nn.Module) -> None:
    for module in model.modules():
        if "Norm" in type(module).__name__:
            for param in module.parameters():
                cast(param, torch.float32)


def _reading(by_parts: bool, pretrained: str, device: torch.device) -> contextlib.AbstractContextManager:
    if not by_parts:
        return contextlib.nullcontext()
    return defer_weights(functools.partial(defer_weight, device=device), read_values,
                         lambda: reading_weights(pretrained))


def _codes(matrix: LazyArray, layer: nn.Module | None, settings: Any, device: torch.device) -> nn.Parameter:
    return defer_codes(Codes(matrix, settings.bnb_4bit_quant_type, settings.bnb_4bit_use_double_quant,
                             settings.bnb_4bit_quant_storage, device), layer)


def base_names(config: PreTrainedConfig) -> dict[str, str]:
    """Map names in files (patterns) to names in a question-answering network, if its base has another name.

    In transformers, the base of these networks is called `transformer` in some families, but `model` in all files.
    """
    from transformers import MODEL_FOR_QUESTION_ANSWERING_MAPPING, MODEL_MAPPING

    if type(config) not in MODEL_MAPPING or type(config) not in MODEL_FOR_QUESTION_ANSWERING_MAPPING:
        return {}
    in_files, in_network = (mapping[type(config)].base_model_prefix
                            for mapping in (MODEL_MAPPING, MODEL_FOR_QUESTION_ANSWERING_MAPPING))
    return {} if in_files == in_network else {rf"^{in_files}\.": f"{in_network}."}


def _quantization(quantize: Quantize, double_quant: bool, storage: str, compute: torch.dtype, skip: list[str] | None):
    from transformers import BitsAndBytesConfig

    if quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quantize, bnb_4bit_use_double_quant=double_quant,
                              bnb_4bit_compute_dtype=compute, bnb_4bit_quant_storage=storage,
                              llm_int8_skip_modules=skip)


def resize_embeddings(model: nn.Module, num_tokens: int, abstract: bool = False) -> list[int]:
    """Enlarge the embeddings to `num_tokens` rows; new rows are the mean of the old rows. Return their ids.

    A matrix with more rows, such as padding to a multiple, does not change.

    Args:
        abstract: Leave the values of new rows arbitrary.
    """
    embedding = model.get_input_embeddings()
    old = embedding.weight.shape[0]
    if num_tokens <= old:
        return []
    say(new_rows_message(num_tokens, old))
    model.resize_token_embeddings(num_tokens, mean_resizing=False)
    # A matrix shared by embedding and head is filled twice, with equal values, as only old rows are read.
    for layer in () if abstract else vocabulary_layers(model):
        for param in {layer.weight, getattr(layer, "bias", None)} - {None}:
            param.data[old:] = torch.from_numpy(mean_row(param.data[:old].float().cpu().numpy()))
    return list(range(old, num_tokens))


def vocabulary_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers whose first dimension is the vocabulary: embeddings, and an output layer if there is one."""
    per_layer = getattr(model.base_model, "embed_tokens_per_layer", None)  # Gemma 4
    layers = dict.fromkeys((model.get_input_embeddings(), model.get_output_embeddings(), per_layer))
    return [layer for layer in layers if layer is not None]


# ---------------------------------------------------------------------------------------------------------------------
# A base spread over the GPUs of one machine by accelerate, as in qlora.py: each layer is on one device.

SIZE = re.compile(r"\d+(\.\d+)?\s*[KMGT]i?B", re.IGNORECASE)


def placement(max_memory: str | dict[int | str, str]) -> dict[str, Any]:
    """Return the arguments of from_pretrained that spread a model within these limits.

    Args:
        max_memory: One limit for every GPU ("20GiB", "20000MB"), or a limit by device: GPU index, or `cpu` on a machine
            without GPUs.

    Raises:
        UserError: An unknown device or an invalid size.
    """
    num_gpus = torch.cuda.device_count()
    devices = list(range(num_gpus)) or ["cpu"]
    if isinstance(max_memory, str) and not num_gpus:
        raise UserError(f"model.max_memory is {max_memory} per GPU, but this machine has no GPU. Remove it, or name "
                        "the device, as in {cpu: 8GiB}.")
    limits = dict.fromkeys(devices, max_memory) if isinstance(max_memory, str) else max_memory
    for device, size in limits.items():
        if device not in devices:
            raise UserError(f"model.max_memory names the device {device!r}, which cannot train on this machine. Use "
                            f"{', '.join(map(str, devices))}.")
        if not SIZE.fullmatch(str(size).strip()):
            raise UserError(f"model.max_memory: {size!r} is not a memory size. Use for example 20GiB or 20000MB.")
    return {"device_map": "auto", "max_memory": dict(limits)}


def keep_in_place(model: nn.Module, max_memory: str | dict[int | str, str]) -> None:
    """Keep Lightning from moving a spread model to a single device.

    Raises:
        UserError: Parts were offloaded to host memory or disk, where nothing trains.
    """
    devices = set(range(torch.cuda.device_count())) or {"cpu"}
    device_map = getattr(model, "hf_device_map", {})  # absent if the model is on one device
    offloaded = [part for part, device in device_map.items() if device not in devices]
    if offloaded:
        raise no_room(max_memory, offloaded[0])
    if device_map:
        disable_moving(model)


def no_room(max_memory: str | dict[int | str, str], part: str = "some of its layers") -> UserError:
    """Return the error for a model that would be offloaded to host memory or disk in part."""
    return UserError(f"model.max_memory is {max_memory}, which is too little for the model ({part} does not fit). "
                     "Raise it, or set model.quantize.")
