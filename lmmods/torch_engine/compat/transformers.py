"""Private parts of transformers that the torch engine uses, as of transformers 5.24.

Each use is tested by tests/compat/test_transformers.py. Registering attention functions, `sdpa_mask` and
`sdpa_attention_forward` are documented under "Attention interface".
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils.logging import set_tqdm_hook

from lmmods.core.lazy_array import LazyArray
from lmmods.torch_engine.compat.torch import storage_of


def attention_name(model: nn.Module) -> str:
    """Return the attention implementation in use: `config._attn_implementation`; only its setter is public."""
    return model.config._attn_implementation


def can_change_attention(model: nn.Module) -> bool:
    """True if `set_attn_implementation` affects the architecture: `_can_set_attn_implementation`.

    Otherwise `set_attn_implementation` only warns.
    """
    return model._can_set_attn_implementation()


def masks_of_documents(model: nn.Module, is_image: Tensor, segments: Tensor) -> dict[str, Tensor]:
    """Return Gemma 3's masks of packed rows, by type of layer: `masking_utils`, and the blocks of `modeling_gemma3`.

    transformers itself compares indices in the row with positions in documents, in layers with a sliding window.

    Args:
        model: With or without PEFT's wrapper.
        is_image: [B, T] bool. Consecutive image tokens of a document are an image, and attend to each other.
        segments: [B, T], a number for each document of a row.
    """
    from transformers.masking_utils import (
        and_masks,
        blockwise_overlay,
        create_causal_mask,
        packed_sequence_mask_function,
        sliding_window_overlay,
    )
    from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

    config = model.config.get_text_config()
    documents, images = packed_sequence_mask_function(segments), get_block_sequence_ids_for_mask(is_image.long())
    # Only shape, dtype and device of the embeddings matter.
    embeddings = model.get_input_embeddings().weight.new_empty(*segments.shape, 0)
    visible = {"full_attention": documents,
               "sliding_attention": and_masks(documents, sliding_window_overlay(config.sliding_window))}
    return {name: create_causal_mask(config, embeddings, None, None, or_mask_function=blockwise_overlay(images),
                                     and_mask_function=function) for name, function in visible.items()}


def layers_to_quantize(model: nn.Module, skip: list[str] | None) -> list[str]:
    """Return the names of the linear layers that bitsandbytes packs: not in `HfQuantizer.get_modules_to_not_convert`.

    Args:
        skip: Modules that `from_pretrained` skips instead of the output layer.
    """
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = HfQuantizer.get_modules_to_not_convert(model, skip, model._keep_in_fp32_modules)
    return [name for name, module in model.named_modules()
            if type(module) in (nn.Linear, Conv1D) and should_convert_module(name, skipped)]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Make from_pretrained show its progress bar only after two seconds, and its "LOAD REPORT" only with an error.

    The report lists missing and unexpected weights. The filter is on the module's logger, as the public API only sets
    the level of all loggers of transformers.
    """
    logger, reports = logging.getLogger("transformers.modeling_utils"), []

    def is_other(record: logging.LogRecord) -> bool:
        is_report = "LOAD REPORT" in str(record.msg)
        if is_report:
            reports.append(record)
        return not is_report

    logger.addFilter(is_other)
    hook = set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **kwargs, delay=2, leave=False))
    try:
        yield
    except BaseException:
        logger.removeFilter(is_other)
        # Loading has failed, so the report may contain the reason.
        for report in reports:
            logger.handle(report)
        raise
    finally:
        logger.removeFilter(is_other)
        set_tqdm_hook(hook)


@contextmanager
def defer_weights(wait: Callable[[Any, LazyArray | None], nn.Parameter], values: Callable[[nn.Parameter], Tensor],
                  reading: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Make from_pretrained put placeholders into the network instead of reading weights.

    Deferred are parameters that are one tensor of a safetensors file, and codes of bitsandbytes, whose values nothing
    uses. `modeling_utils.safe_open` opens files, `core_model_loading.spawn_materialize` reads a tensor, one of a list
    if `tensor_idx` is given, and `set_param_for_module` assigns it. `caching_allocator_warmup` would allocate the
    memory of all weights on the device; `_tied_params_are_equal` compares tied parameters that are both in the files.

    Args:
        wait: Returns the placeholder of a parameter, given a `LazyArray` and None; or its values, if they had to be
            computed from several tensors, and None; or a parameter that stands for codes, and the codes.
        values: Returns the values of a placeholder.
        reading: Context of each later read of a file.
    """
    from safetensors import safe_open
    from transformers import core_model_loading, modeling_utils

    materialize, put = core_model_loading.spawn_materialize, core_model_loading.set_param_for_module
    equal = modeling_utils._tied_params_are_equal

    class Name:
        """A tensor in a file, which is reopened for each read, as mapped pages that were read count as memory."""

        def __init__(self, file: str, name: str, opened: Any):
            self.file, self.name, self.opened = file, name, opened

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self.opened, attribute)

        def __getitem__(self, part: Any) -> Tensor:
            with reading(), safe_open(self.file, "pt") as file:
                return file.get_slice(self.name)[part]

        # `copy=True`, as a view would keep the mapped file in memory.
        def lazy(self, dtype: torch.dtype) -> LazyArray:
            return LazyArray(self.opened.get_shape(), dtype, lambda part: self[part].to(dtype, copy=True), torch.empty)

    class File:
        def __init__(self, path: str, **options: Any):
            self.path, self.opened = path, safe_open(path, **options)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self.opened, attribute)

        def __enter__(self) -> "File":
            return self

        def __exit__(self, *error: Any) -> None:
            self.opened.__exit__(*error)

        def get_slice(self, name: str) -> Name:
            return Name(self.path, name, self.opened.get_slice(name))

    codes: dict[int, tuple[LazyArray, Tensor]] = {}  # by the storage of their placeholder, kept alive

    def stand_in(array: LazyArray, device: Any) -> Tensor:
        scalar = torch.zeros((), dtype=array.dtype, device=device)
        codes[storage_of(scalar)] = array, scalar
        return scalar.expand(array.shape)

    def deferred(pool: Any, tensor: Any, device: Any = None, dtype: torch.dtype | None = None, tensor_idx: Any = None,
                 **options: Any) -> Callable[[], Any]:
        # The tensor becomes a parameter as it is. With `tensor_idx` it would be a part of a parameter.
        if tensor_idx is None and isinstance(tensor, Name) and dtype is not None and tensor.get_shape():
            return lambda: tensor.lazy(dtype)
        # Codes of bitsandbytes in a file are uint8 [n, 1].
        if isinstance(tensor, Name) and tensor.get_dtype() == "U8" and tensor.get_shape()[1:] == [1]:
            return lambda: stand_in(tensor.lazy(torch.uint8), device)
        return materialize(None, tensor, device, dtype, tensor_idx=tensor_idx, **options)

    def set_param(model: nn.Module, name: str, value: Any, *others: Any) -> None:
        path, _, own = name.rpartition(".")
        before = getattr(model.get_submodule(path), own)
        # Buffers and scalars are read at once.
        if isinstance(before, nn.Parameter) and before.ndim:
            stands_for, _ = codes.get(storage_of(value), (None, None)) if isinstance(value, Tensor) else (None, None)
            value = wait(value, stands_for)
        elif isinstance(value, LazyArray):
            value = value.read_rows(slice(None))
        put(model, name, value, *others)

    with (_patch(modeling_utils, "safe_open", File), _patch(core_model_loading, "spawn_materialize", deferred),
          _patch(core_model_loading, "set_param_for_module", set_param),
          _patch(modeling_utils, "_tied_params_are_equal", lambda one, other: equal(values(one), values(other))),
          _patch(modeling_utils, "caching_allocator_warmup", lambda *_: None)):
        yield


@contextmanager
def quantising(chosen: Callable[[str, Tensor], bool], from_mxfp4: bool,
               wait: Callable[[Any, nn.Module | None, Any], nn.Parameter] | None = None,
               before: Callable[[nn.Module, str, Any], Any] | None = None) -> Iterator[dict[str, Any]]:
    """Make from_pretrained with 4-bit weights also quantise the chosen parameters, each as soon as it is read.

    Yields a dictionary that will hold bitsandbytes' `QuantState` of each, by name. The class in
    `AUTO_QUANTIZER_MAPPING` is replaced meanwhile, with `param_needs_quantization` and `get_quantize_ops`, whose result
    has `convert`.

    Args:
        chosen: Returns True for a parameter to quantise, given its name and the parameter before it is read.
        from_mxfp4: True if the files hold MXFP4, dequantised by its own quantiser's `get_weight_conversions`.
        wait: Within `defer_weights`, returns the placeholder of a matrix [out, in] that has not been read, or of chosen
            matrices [E, ...], given the linear layer, if it is one, and the settings (BitsAndBytesConfig).
        before: Returns what is quantised instead of a linear layer's weight, given the model, the parameter's name and
            the weight as it is stored, of which one within `defer_weights` may be a `LazyArray`.
    """
    from transformers import Mxfp4Config
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    states: dict[str, Any] = {}

    class Quantize(Bnb4bitQuantize):
        def convert(self, input_dict: dict[str, Any], model: nn.Module | None = None, **kwargs: Any) -> dict[str, Any]:
            from bitsandbytes.nn import Params4bit

            converted, settings = {}, self.hf_quantizer.quantization_config
            for name, value in input_dict.items():
                value = value[0] if isinstance(value, list) else value
                if before is not None and not chosen(name, model.get_parameter(name)):
                    value = before(model, name, value)
                if isinstance(value, LazyArray):
                    # A chosen parameter has no layer; any other is the weight of a linear layer.
                    layer = None if chosen(name, model.get_parameter(name)) else model.get_submodule(
                        name.rpartition(".")[0])
                    if layer is not None:
                        layer._is_hf_initialized = True  # so that the layer is not initialised again
                        # Conv1D has [in, out]
                        value = value.transposed() if issubclass(layer.source_cls, Conv1D) else value
                    converted[name] = wait(value, layer, settings)
                    if layer is None:
                        states[name] = converted[name].quant_state
                    continue
                if not chosen(name, model.get_parameter(name)):
                    converted |= super().convert({name: value}, model=model, **kwargs)
                    continue
                converted[name] = Params4bit(
                    value, requires_grad=False, quant_type=settings.bnb_4bit_quant_type,
                    compress_statistics=settings.bnb_4bit_use_double_quant,
                    quant_storage=settings.bnb_4bit_quant_storage).to(value.device)
                states[name] = converted[name].quant_state
            return converted

    class Quantizer(AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"]):
        def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
            module, _, name = param_name.rpartition(".")
            parameter = dict(model.get_submodule(module).named_parameters(recurse=False)).get(name)
            is_chosen = parameter is not None and not self.pre_quantized and chosen(param_name, parameter)
            return is_chosen or super().param_needs_quantization(model, param_name, **kwargs)

        def get_quantize_ops(self) -> Quantize:
            return Quantize(self)

        def get_weight_conversions(self) -> list[Any]:
            if not from_mxfp4:
                return super().get_weight_conversions()
            reader = AUTO_QUANTIZER_MAPPING["mxfp4"](Mxfp4Config(dequantize=True), pre_quantized=True)
            return reader.get_weight_conversions()

    original, AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"], Quantizer
    try:
        yield states
    finally:
        AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = original


class PreallocatedLayer(DynamicLayer):
    """Keys and values with space for more tokens, so that a step does not copy all of them as `DynamicLayer` does."""

    EXTRA = 64  # number of tokens

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states [B, heads, T, D] of new tokens; return the states of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self._full: tuple[Tensor, ...] = self.keys, self.values
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if end > self._full[0].shape[2] or len(key_states) != len(self._full[0]):
            old, self._full = (self.keys, self.values), tuple(
                states.new_empty(*states.shape[:2], end + self.EXTRA, states.shape[3])
                for states in (key_states, value_states))
            for full, states in zip(self._full, old, strict=True):
                full[:, :, :start] = states
        for full, states in zip(self._full, (key_states, value_states), strict=True):
            full[:, :, start:end] = states
        self.keys, self.values = (full[:, :, :end] for full in self._full)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, in this order; rows may repeat."""
        super().reorder_cache(beam_idx)
        if self.is_initialized:
            self._full = self.keys, self.values  # without extra space, which the next token allocates


def has_separable_rows(cache: Any) -> bool:
    """True if `reorder_cache` can drop and repeat rows: each layer keeps keys and values by row, and nothing else."""
    # A layer that shares another layer's keys and values has a placeholder, in versions with such layers.
    classes = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
    return type(cache) is DynamicCache and bool(cache.layers) and all(type(layer) in classes for layer in cache.layers)


def preallocate_cache(cache: DynamicCache) -> None:
    """Exchange an unused cache's layers for `PreallocatedLayer`, but those with a sliding window: `Cache.layers`."""
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]


class FixedLayer(DynamicLayer):
    """Keys and values of a fixed size, with the columns of future tokens, which masks hide.

    Args:
        layer: Layer with the states of `length` tokens, which are copied.
        size: Number of columns.
        column: [1], column of the next token, which `update` reads.
    """

    def __init__(self, layer: DynamicLayer, length: int, size: int, column: Tensor):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        # Zeros, as a hidden NaN would not be hidden.
        self.keys, self.values = (F.pad(states[:, :, :length], (0, 0, 0, size - length))
                                  for states in (layer.keys, layer.values))
        self._column = column

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states [B, heads, 1, D] of a token; return the states of all columns."""
        for full, states in ((self.keys, key_states), (self.values, value_states)):
            full.index_copy_(2, self._column, states.to(full.dtype))  # autocast may change the type after the prompt
        return self.keys, self.values


def has_whole_layers(cache: Any) -> bool:
    """True if each layer of a cache keeps keys and values of all tokens, and nothing else: `Cache.layers`."""
    return type(cache) is DynamicCache and all(type(layer) in (DynamicLayer, PreallocatedLayer)
                                               for layer in cache.layers)


def can_compile_steps(model: nn.Module) -> bool:
    """True if transformers runs the model in compiled steps without a break: `_can_compile_fullgraph`."""
    return model._can_compile_fullgraph


def decoding_experts(model: nn.Module) -> AbstractContextManager:
    """Return the context in which experts use the implementation for few tokens: `_optimize_model_for_decode`."""
    return model._optimize_model_for_decode()


@contextmanager
def skip_initial_weights() -> Iterator[None]:
    """While entered, new models of transformers keep their modules' own initial values, untied: `init_weights`.

    `initialization.no_init_weights` would also skip the modules' own initialisation, which some architectures rely on.
    """
    with _replace_method("init_weights", lambda _: lambda model: None):
        yield


@contextmanager
def wrap_missing_weights(start: Callable[[nn.Module, Callable[[], None]], None]) -> Iterator[None]:
    """Call `start` when from_pretrained initialises the weights that its files lack: `initialize_weights`.

    Args:
        start: Called with the model and the function that initialises its weights, except those in the files.
    """
    with _replace_method("initialize_weights", lambda original: lambda model: start(model, lambda: original(model))):
        yield


@contextmanager
def before_each_module(enter: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call `enter` with each module before its weights are initialised: `_initialize_weights`."""
    def entered(original: Callable) -> Callable:
        def initialize(model: nn.Module, module: nn.Module, *args: Any) -> None:
            enter(module)
            original(model, module, *args)

        return initialize

    with _replace_method("_initialize_weights", entered):
        yield


@contextmanager
def replace_truncated_normals(draw: Callable[[Tensor, float, float, float], None]) -> Iterator[None]:
    """Call `draw` when a model draws from a truncated normal distribution: `initialization.trunc_normal_`.

    As there, weights read from a file are skipped: `_is_hf_initialized`.

    Args:
        draw: Called with parameter, mean, standard deviation, and the distance of both bounds from the mean in standard
            deviations. The original function handles bounds that are not symmetric.
    """
    from transformers import initialization

    original = initialization.trunc_normal_

    def replaced(tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0,
                 generator: Any = None) -> Tensor:
        if getattr(tensor, "_is_hf_initialized", False) or generator is not None or b - mean != mean - a:
            return original(tensor, mean, std, a, b, generator)
        draw(tensor, mean, std, (b - mean) / std)
        return tensor

    initialization.trunc_normal_ = replaced
    try:
        yield
    finally:
        initialization.trunc_normal_ = original


@contextmanager
def _replace_method(method: str, replacement: Callable[[Callable], Callable]) -> Iterator[None]:
    from transformers import PreTrainedModel

    with _patch(PreTrainedModel, method, replacement(getattr(PreTrainedModel, method))):
        yield


@contextmanager
def _patch(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
