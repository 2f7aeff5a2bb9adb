"""From a folder or hub id to a network ready to train: dtypes, quantisation, embeddings, adapters."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lmmods.core.console import say, warn
from lmmods.core.errors import UserError, first_line, one_line
from lmmods.core.hf_config import check_saved_quantization, load_config, saved_quantization
from lmmods.core.initializers import init_lora_A, init_weight
from lmmods.core.out_of_memory import is_out_of_memory
from lmmods.core.settings import LoRA, quantised_in_full
from lmmods.core.weights_files import check_weights, reading_weights
from lmmods.torch_engine.nn.attention import choosing_attention
from lmmods.torch_engine.nn.cpu_kernels import work_around_cpu_kernels
from lmmods.torch_engine.nn.spreading import keep_in_place, no_room, placement

Quantize = Literal["nf4", "fp4", "int8"]
COMPUTE_DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16,
                  "16-mixed": torch.float16}


def load_pretrained(
    auto_class: type,
    pretrained: str,
    *,
    overrides: dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantize: Quantize | None = None,
    double_quant: bool = True,
    quant_storage: str | None = None,
    precision: str = "32-true",
    frozen: bool = False,
    attention: str | None = None,
    device: torch.device | None = None,
    max_memory: str | dict[int | str, str] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Load weights, quantised or not, in the dtypes that the precision asks for, in training mode.

    A frozen base is stored in the compute dtype with its norms in float32; a trained one in float32 under mixed
    precision. from_pretrained returns eval mode, in which Lightning would train without dropout and without gradient
    checkpointing.

    Args:
        auto_class: `AutoModelFor...` of transformers.
        pretrained: Folder or hub id.
        overrides: Fields changed in its configuration.
        quantize: 4-bit or 8-bit weights of every linear layer but the output head (bitsandbytes).
        precision: Lightning's name.
        frozen: The base itself does not train.
        device: Where quantised weights are made.
        max_memory: Spread the model over the GPUs of this machine under these limits; see `spreading`.
        seed: Of the weights of a head that the checkpoint lacks.

    Raises:
        UserError: The model cannot be found or read.
    """
    compute = COMPUTE_DTYPES[precision]
    stored = compute if frozen or precision.endswith("true") else torch.float32
    if trust_remote_code:
        warn(f"trust_remote_code is on: Python code that comes with {pretrained} will run on this machine.")
    # The span head is new to the model and trains in full; transformers itself spares only vocabulary heads.
    skip = ["qa_outputs"] if auto_class.__name__ == "AutoModelForQuestionAnswering" else None
    config = load_config(pretrained, overrides, revision, trust_remote_code)
    saved = saved_quantization(config)
    check_saved_quantization(saved, pretrained, quantize, frozen)
    options: dict[str, Any] = {"device_map": {"": device or "cpu"}} if quantize or saved else {}
    if max_memory is not None:
        options = placement(max_memory)
    if quantize and not saved:
        options["quantization_config"] = _quantization(quantize, double_quant, quant_storage or "uint8", compute, skip)
    check_weights(pretrained)
    with reading_weights(pretrained), choosing_attention(attention):
        try:
            model, info = auto_class.from_pretrained(pretrained, config=config, revision=revision, dtype=stored,
                                                     trust_remote_code=trust_remote_code, attn_implementation=attention,
                                                     output_loading_info=True, **options)
        except (ValueError, RuntimeError) as error:
            if max_memory is not None and "dispatched on the CPU or the disk" in str(error):  # says bitsandbytes
                raise no_room(max_memory) from error
            raise
    _start_missing(model, info["missing_keys"], seed)
    work_around_cpu_kernels(model)
    if max_memory is not None:
        keep_in_place(model, max_memory)
    if saved:  # what a quantised folder stores beside its packed weights keeps the type it was saved in
        for param in model.parameters():
            if type(param) is nn.Parameter and param.is_floating_point():
                param.data = param.data.to(stored)
    if frozen and precision != "bf16-true":
        for module in model.modules():
            if "Norm" in type(module).__name__:
                module.float()
    return model.train()


@torch.no_grad()
def _start_missing(model: nn.Module, names: Iterable[str], seed: int) -> None:
    """Weights that transformers has drawn itself start as on the other engine."""
    params = dict(model.named_parameters())
    std = getattr(model.config, "initializer_range", 0.02)
    for name in set(names) & set(params):
        if params[name].is_floating_point() and not ("norm" in name.lower() and name.endswith("weight")):
            params[name].copy_(torch.from_numpy(init_weight(seed, name, tuple(params[name].shape), std)))


def _quantization(quantize: Quantize, double_quant: bool, storage: str, compute: torch.dtype,
                  skip: list[str] | None):
    from transformers import BitsAndBytesConfig

    if quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantize,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=storage,
        llm_int8_skip_modules=skip,
    )


def resize_embeddings(model: nn.Module, num_tokens: int) -> list[int]:
    """Make room for `num_tokens` tokens; new rows are the mean of the old. Returns the new rows' ids.

    A matrix that is larger already (padded to a multiple, say) is left alone.
    """
    embedding = model.get_input_embeddings()
    old = embedding.weight.shape[0]
    if num_tokens <= old:
        return []
    say(f"The tokenizer has {num_tokens} tokens, the model {old}: {num_tokens - old} rows are added, "
                   "each the mean of the old ones.")
    model.resize_token_embeddings(num_tokens, mean_resizing=False)
    for layer in {model.get_input_embeddings(), model.get_output_embeddings()} - {None}:
        weight = layer.weight.data
        weight[old:] = weight[:old].float().mean(dim=0, keepdim=True).to(weight.dtype)
    return list(range(old, num_tokens))


def add_lora(model: nn.Module, settings: LoRA, trainable_tokens: list[int], dtype: torch.dtype,
             task_type: str | None = None, seed: int = 0) -> nn.Module:
    """Wrap `model` with a fresh PEFT adapter; the base is frozen.

    Args:
        trainable_tokens: Rows of the embedding that train beside the adapter (tokens new to the model).
        dtype: Of the adapter's weights.
        task_type: PEFT's name of the task, by which its own loaders pick the model class.
        seed: Of the first weights.

    Raises:
        UserError: A target matches no module.
    """
    from peft import LoraConfig, get_peft_model

    targets = [settings.targets] if isinstance(settings.targets, str) else settings.targets
    _check_targets(model, targets, settings.modules_to_save or [])
    for name, module in model.named_modules():
        saved = any(f".{name}.".endswith(f".{wanted}.") for wanted in settings.modules_to_save or [])
        if saved and isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            raise UserError(quantised_in_full(name, "int8" if module.weight.dtype == torch.int8 else "4 bits"))
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        modules_to_save=settings.modules_to_save,
        use_dora=settings.dora,
        use_rslora=settings.rslora,
        trainable_token_indices=trainable_tokens or None,
        # PEFT trains the span head, new to the model, in full; an adapter on it as well would clash.
        exclude_modules=["qa_outputs"] if task_type == "QUESTION_ANS" else None,
        task_type=task_type,
    )
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, param in wrapped.named_parameters():
            if ".lora_A." in name:
                param.copy_(torch.from_numpy(init_lora_A(seed, name, tuple(param.shape))))
    return _cast_trainable(wrapped, dtype)


def continue_adapter(model: nn.Module, folder: str, dtype: torch.dtype) -> nn.Module:
    """Wrap `model` with the adapter in `folder` (written by PEFT or by this project), ready to train on.

    Raises:
        UserError: The folder holds no adapter, or one that does not fit the model.
    """
    from peft import PeftModel

    if not (Path(folder) / "adapter_config.json").is_file():
        raise UserError(f"model.adapter: {folder} holds no adapter_config.json. Name a folder written by PEFT's "
                        "save_pretrained, for example runs/NAME/model.")
    try:
        wrapped = PeftModel.from_pretrained(model, folder, is_trainable=True, autocast_adapter_dtype=False)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"model.adapter: the adapter in {folder} does not fit the base model: "
                        f"{first_line(error)}") from error
    return _cast_trainable(wrapped, dtype)


def _cast_trainable(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(dtype)
    return model


def _check_targets(model: nn.Module, targets: list[str], to_save: list[str]) -> None:
    linear = _adaptable(model)
    if not linear:
        raise UserError("lora.targets: this model has no linear layer, so there is nothing to adapt.")
    modules = [name for name, _ in model.named_modules()]
    wanted = [("lora.targets", name, linear) for name in targets if name != "all-linear"]
    wanted += [("lora.modules_to_save", name, modules) for name in to_save]
    for key, name, present in wanted:
        if not any(full == name or full.endswith(f".{name}") for full in present):
            candidates = sorted({full.rsplit(".", 1)[-1] for full in linear})
            raise UserError(f"{key}: {name!r} matches no module of this model. Candidates: {', '.join(candidates)}.")


def _adaptable(model: nn.Module) -> list[str]:
    """Names of the linear layers (quantised ones and GPT-2's Conv1D included) without the output head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, Conv1D)) and module is not head]


@contextlib.contextmanager
def sizes_checked() -> Iterator[None]:
    """While a network of chosen sizes is made: sizes that no network has are told as what they are. UserError."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"model.config: no network can be made of these fields: {one_line(error)}") from error


def enable_checkpointing(model: nn.Module) -> None:
    """Recompute activations in the backward pass (Chen et al. 2016), in the form that also trains adapters.

    The reentrant form drops the gradient of a block whose input needs none, which is every block over a frozen
    embedding.

    Raises:
        UserError: transformers cannot do it for this architecture, and its blocks are not found either.
    """
    arguments = {"use_reentrant": False}
    if not model.supports_gradient_checkpointing:
        return _checkpoint_blocks(model)
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(arguments)
    else:  # transformers before 5.20
        model.gradient_checkpointing_enable(arguments)


def _checkpoint_blocks(model: nn.Module) -> None:
    """The same for what transformers leaves out, such as ALBERT, whose blocks share weights: each call of a block."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        inside = any(module is part for block in blocks for part in block.modules())
        if isinstance(module, nn.ModuleList) and not inside:
            blocks += [block for block in module if not isinstance(block, nn.ModuleList)]
    if not blocks:
        raise UserError(f"model.gradient_checkpointing: no blocks are found in {type(model).__name__} that could be "
                        "computed anew. Set it to false.")
    for block in blocks:
        block.forward = _recomputed(block, block.forward)


def _recomputed(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return forward(*args, **kwargs)

    return run


def fuse_activations(model: nn.Module) -> None:
    """Compute GPT-2's GELU in one pass instead of eight; same function, float32 rounding apart."""
    from transformers.activations import NewGELUActivation

    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is NewGELUActivation:
                setattr(module, name, nn.GELU(approximate="tanh"))


def compile_layers(model: nn.Module) -> None:
    """Let torch.compile make one program of each kind of layer."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile()
