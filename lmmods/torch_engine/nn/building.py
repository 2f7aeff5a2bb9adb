"""Build a task's network: load or initialise it, resize it to the tokenizer, add adapters, compile it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lmmods.core.adapters import tokens_to_train
from lmmods.core.errors import UserError, is_out_of_memory, one_line
from lmmods.core.freezing import check_new_tokens, chosen
from lmmods.core.hf_config import TEXT_WRITERS, load_config, set_special_ids, vocabulary_fields
from lmmods.core.image_models import has_other_parts
from lmmods.core.memory import MLP_CHUNK
from lmmods.data.base import DataModule
from lmmods.recipe.tasks.base import TaskFields
from lmmods.torch_engine.compat.peft import adapts_parameters
from lmmods.torch_engine.nn.attention import attention_errors, prefer_cpu_kernels, say_eager
from lmmods.torch_engine.nn.cpu_kernels import bound_onednn_cache
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.nn.experts import packed_parameter_names
from lmmods.torch_engine.nn.initialization import from_config
from lmmods.torch_engine.nn.loading import load_pretrained, resize_embeddings, vocabulary_layers
from lmmods.torch_engine.nn.lora import add_lora, continue_adapter, fuse_adapters
from lmmods.torch_engine.nn.principal import PrincipalParts
from lmmods.torch_engine.nn.stored import fill


def build_network(fields: TaskFields, auto_class: str, task_type: str | None, data: DataModule, *, precision: str,
                  device: torch.device, seed: int, by_parts: bool = False, frozen: bool = False, abstract: bool = False
                  ) -> nn.Module:
    """Build the network described by the fields of a task, in training mode.

    Args:
        auto_class: `AutoModelFor...` of transformers.
        task_type: PEFT's name of the task.
        precision: Lightning's name of the precision.
        seed: Seed of all weights that are not loaded from a file.
        by_parts: The network will be sharded: weights that are in files or can be initialised in parts are deferred
            until then; see `stored`.
        frozen: Nothing trains, so the base may be quantised and is stored as under an adapter.
        abstract: Only shapes, dtypes and structure matter: values are arbitrary and may be missing (fake tensors), no
            weights are read, and dropout masks are not computed.

    Raises:
        UserError: The model cannot be found, read or built, or an adapter does not fit it.
    """
    bound_onednn_cache()
    torch.manual_seed(seed)
    is_causal = auto_class in TEXT_WRITERS
    overrides = {**(fields.overrides or {}), **data.network_fields} or None
    principal = None if fields.starts_at_base or abstract else PrincipalParts(fields.lora)
    model = _base(fields, overrides, auto_class, vocabulary_fields(data.tokenizer, is_causal), precision, device, seed,
                  by_parts, frozen or fields.trains_adapter, abstract, principal)
    if fields.fast_kernels:
        fuse_activations(model)
        if device.type == "cpu" and fields.attention is None:
            prefer_cpu_kernels(model, precision)
    if fields.attention is None:
        say_eager(model)
    num_rows = model.get_input_embeddings().weight.shape[0]
    # Resizing reads the old rows, so deferred values must be read first.
    if num_rows < len(data.tokenizer):
        for layer in vocabulary_layers(model):
            fill(layer)
    resize_embeddings(model, len(data.tokenizer), abstract)
    set_special_ids(model.config, data.tokenizer, is_causal)
    if fields.trains_adapter:
        torch.manual_seed(seed)  # the adapter's initial values must not depend on how the base was loaded
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        if fields.lora:
            model = add_lora(model, fields.lora, tokens_to_train(data, num_rows), dtype, task_type, seed, abstract,
                             principal)
        else:
            model = continue_adapter(model, fields.adapter, dtype, fields.adapter_has_dropout, abstract)
        if fields.fast_kernels and not fields.compile:  # the compiler fuses them itself
            fuse_adapters(model)
    elif fields.freezes:
        freeze(model, fields, tokens_to_train(data, num_rows))
    # After the adapters, to replace their Dropout modules too. Checkpointing needs its contexts. Compile last, when the
    # network is complete.
    dropout = TokenDropout(model, compiled=fields.compile, abstract=abstract,
                           noise=0.0 if frozen else fields.neftune_alpha or 0.0)
    if fields.gradient_checkpointing:
        offloads = fields.gradient_checkpointing == "offload" and device.type != "cpu"
        enable_checkpointing(model, dropout.contexts, offloads)
        if fields.gradient_checkpointing == "offload":
            chunk_mlps(model, dropout)
    if fields.compile:
        compile_layers(model)
    return model.train()


def _base(fields: TaskFields, overrides: dict[str, Any] | None, auto_class: str, vocabulary: dict[str, Any],
          precision: str, device: torch.device, seed: int, by_parts: bool, frozen: bool, abstract: bool,
          principal: PrincipalParts | None) -> nn.Module:
    """Return the network without adapter, loaded or with random weights."""
    import transformers

    auto = getattr(transformers, auto_class)
    if fields.config is not None:
        config = load_config(fields.config, overrides, fields.revision, fields.trust_remote_code,
                             vocabulary, fields.all_parts)
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32

        def make() -> nn.Module:
            return auto.from_config(config, dtype=dtype, attn_implementation=fields.attention,
                                    trust_remote_code=fields.trust_remote_code)

        with _config_errors(), attention_errors(fields.attention):
            return make() if abstract else from_config(make, seed, by_parts)
    return load_pretrained(auto, fields.pretrained, overrides=overrides, revision=fields.revision,
                           trust_remote_code=fields.trust_remote_code, quantize=fields.quantize,
                           double_quant=fields.double_quant, quant_storage=fields.quant_storage, precision=precision,
                           frozen=frozen, attention=fields.attention, device=device,
                           max_memory=fields.max_memory, seed=seed, by_parts=by_parts, abstract=abstract,
                           before_quantising=principal and principal.residual, adapter=fields.adapter,
                           all_parts=fields.all_parts)


@contextlib.contextmanager
def _config_errors() -> Iterator[None]:
    """Convert errors of building a network from `model.config` to UserError."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"model.config: no network can be made of these fields: {one_line(error)}") from error


def freeze(model: nn.Module, fields: TaskFields, tokens: list[int]) -> None:
    """Freeze the parameters that `trainable_parameters` and `frozen_parameters` do not select for training.

    Args:
        tokens: Ids of tokens that are new to the model.

    Raises:
        UserError: A pattern matches nothing, nothing trains, or a new token's embedding does not train.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    trained = chosen({aliases[0]: aliases for aliases in names.values()}, fields.trainable_parameters,
                     fields.frozen_parameters)
    for param, aliases in names.items():
        if aliases[0] not in trained:
            param.requires_grad_(False)
    check_new_tokens(tokens, model.get_input_embeddings().weight.requires_grad)


def fuse_activations(model: nn.Module) -> None:
    """Compute GPT-2's GELU in one pass instead of eight; the same function up to float32 rounding."""
    from transformers.activations import NewGELUActivation

    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is NewGELUActivation:
                setattr(module, name, nn.GELU(approximate="tanh"))


def compile_layers(model: nn.Module) -> None:
    """Compile each layer with torch.compile; equal layers share their code. Raises UserError if not supported."""
    if adapts_parameters(model):
        raise UserError("model.compile: adapters on experts (lora.target_parameters) create new matrices in each "
                        "forward pass, and torch.compile would recompile for each. Set model.compile to false.")
    if packed_parameter_names(model):
        raise UserError("model.compile: 4-bit experts are dequantised when they are read, which torch.compile does not "
                        "support. Set model.compile to false, or model.quantize to null.")
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile()


# ---------------------------------------------------------------------------------------------------------------------
# Gradient checkpointing (Chen et al. 2016): activations are recomputed in the backward pass.

def enable_checkpointing(model: nn.Module, contexts: Callable[[], tuple[Any, Any]] = noop_context_fn,
                         offloads: bool = False) -> None:
    """Recompute activations in the backward pass, in the non-reentrant form.

    The reentrant form loses the gradient of blocks whose input requires none: all blocks after a frozen embedding.

    Args:
        contexts: Returns two contexts for each call of a block: for its forward pass and for its recomputation.
        offloads: Keep the inputs of the blocks in the host's memory.

    Raises:
        UserError: transformers does not support it for this architecture, and its blocks are not found either, or
            their inputs cannot be offloaded.
    """
    if not model.supports_gradient_checkpointing:
        if offloads:
            raise UserError(f"model.gradient_checkpointing is offload, which {type(model).__name__} does not support. "
                            "Set it to true.")
        return _checkpoint_blocks(model, contexts)
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts}, offload=offloads)
    if has_other_parts(model):
        # For the reentrant form, transformers makes inputs of all parts require gradients: a frozen vision tower would
        # keep its activations and run its backward pass.
        model.disable_input_require_grads()


def chunk_mlps(model: nn.Module, dropout: TokenDropout, size: int = MLP_CHUNK) -> None:
    """Compute the MLPs of long rows in chunks of this many tokens, and recompute each chunk in its backward pass.

    The features of only one chunk exist at a time. Experts stay whole: their tokens are routed together.
    """
    for block in model.modules():
        for name, module in block.named_children():
            if name in ("mlp", "feed_forward") and not hasattr(module, "experts"):
                module.forward = _run_in_chunks(module, module.forward, dropout, size)


def _run_in_chunks(module: nn.Module, forward: Callable[[Tensor], Tensor], dropout: TokenDropout, size: int
                   ) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        if not module.training or not torch.is_grad_enabled() or x.ndim != 3 or x.shape[1] <= size:
            return forward(x)
        return torch.cat([checkpoint(forward, x[:, chunk], use_reentrant=False, context_fn=dropout.contexts)
                          for chunk in dropout.chunks(x.shape[1], size)], 1)

    return run


def _checkpoint_blocks(model: nn.Module, contexts: Callable[[], tuple[Any, Any]]) -> None:
    """Checkpoint each call of a block, for architectures that transformers does not support, such as ALBERT."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        # A list inside a block is part of that block.
        is_nested = any(module is inner for block in blocks for inner in block.modules())
        if isinstance(module, nn.ModuleList) and not is_nested:
            blocks += [block for block in module if not isinstance(block, nn.ModuleList)]
    if not blocks:
        raise UserError(f"model.gradient_checkpointing: {type(model).__name__} has no blocks that can be recomputed. "
                        "Set it to false.")
    for block in blocks:
        block.forward = _recompute(block, block.forward, contexts)


def _recompute(block: nn.Module, forward: Callable[..., Any], contexts: Callable[[], tuple[Any, Any]]
              ) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        return forward(*args, **kwargs)

    return run
