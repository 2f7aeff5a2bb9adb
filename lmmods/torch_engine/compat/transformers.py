"""What the torch engine needs of transformers' models that has no public name. Read in transformers 5.24.

Each use is held by tests/compat/test_transformers.py. The attention functions that may be registered, `sdpa_mask` and
`sdpa_attention_forward` are documented under "Attention interface".
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.logging import set_tqdm_hook

from lmmods.core.lazy_array import LazyArray
from lmmods.torch_engine.compat.torch import storage_of


def attention_of(model: nn.Module) -> str:
    """The attention implementation in use: `config._attn_implementation`; there is `set_attn_implementation` alone."""
    return model.config._attn_implementation


def can_change_attention(model: nn.Module) -> bool:
    """Whether `set_attn_implementation` has an effect on the architecture: `_can_set_attn_implementation`.

    Without asking first it only warns.
    """
    return model._can_set_attn_implementation()


@contextmanager
def without_padding() -> Iterator[None]:
    """While this is entered, masks are made as for rows without padding, which need none where all that comes before is
    seen: transformers looks for padding where a mask has values alone.

    `_ignore_causal_mask_sdpa` and `_ignore_bidirectional_mask_sdpa` of `masking_utils` begin with the mask of padding.
    """
    from transformers import masking_utils

    names = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
    originals = {name: getattr(masking_utils, name) for name in names}
    for name, original in originals.items():
        setattr(masking_utils, name, lambda _, *args, original=original, **kwargs: original(None, *args, **kwargs))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(masking_utils, name, original)


def after_step(model: nn.Module, outputs: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the next step of generation: `_update_model_kwargs_for_generation`.

    Architectures override it, so there is nothing of one's own to put in its place in a `custom_generate`.
    """
    return model._update_model_kwargs_for_generation(outputs, kwargs)


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The cache among the arguments of a step of generation: `past_key_values`, from transformers 5.24 on `cache`."""
    return kwargs["cache"] if "cache" in kwargs else kwargs["past_key_values"]


def layers_to_quantize(model: nn.Module, skip: list[str] | None) -> list[str]:
    """Names of the linear layers that bitsandbytes packs: `HfQuantizer.get_modules_to_not_convert` tells the others.

    Args:
        skip: What `from_pretrained` is told to leave, in place of the output layer.
    """
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    left = HfQuantizer.get_modules_to_not_convert(model, skip, model._keep_in_fp32_modules)
    return [name for name, module in model.named_modules()
            if type(module) in (nn.Linear, Conv1D) and should_convert_module(name, left)]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """from_pretrained shows its bar where it takes seconds, and its table of missing and unexpected weights ("LOAD
    REPORT") where it raises an error.

    The logger is that of the module; only the level of all of transformers' loggers is public.
    """
    logger, reports = logging.getLogger("transformers.modeling_utils"), []

    def other(record: logging.LogRecord) -> bool:
        is_report = "LOAD REPORT" in str(record.msg)
        if is_report:
            reports.append(record)
        return not is_report

    logger.addFilter(other)
    hook = set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **kwargs, delay=2, leave=False))
    try:
        yield
    except BaseException:
        logger.removeFilter(other)
        for report in reports:
            logger.handle(report)
        raise
    finally:
        logger.removeFilter(other)
        set_tqdm_hook(hook)


@contextmanager
def reading_parts(wait: Callable[[Any, LazyArray | None], nn.Parameter], values: Callable[[nn.Parameter], Tensor],
                  reading: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """from_pretrained puts stand-ins into the network: what is one tensor of a safetensors file is not read, nor are
    codes of bitsandbytes, at which nothing looks.

    `modeling_utils.safe_open` opens files, `core_model_loading.spawn_materialize` reads a tensor, which is one of a
    list where it is told a `tensor_idx`, `set_param_for_module` puts it in its place. `caching_allocator_warmup`
    would take the memory of all weights from the device, and `_tied_params_are_equal` compares what files hold both of.

    Args:
        wait: Makes the stand-in of a parameter, given a `LazyArray`, or the values where these had to be computed of
            several tensors, or a parameter that stands for codes, and these.
        values: Those of a stand-in.
        reading: What is around each reading of a file, later.
    """
    from safetensors import safe_open
    from transformers import core_model_loading, modeling_utils

    materialize, put = core_model_loading.spawn_materialize, core_model_loading.set_param_for_module
    equal = modeling_utils._tied_params_are_equal

    class Name:
        """A tensor in a file, which is opened anew for each part: what is mapped and was read counts as memory."""

        def __init__(self, file: str, name: str, opened: Any):
            self.file, self.name, self.opened = file, name, opened

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self.opened, attribute)

        def __getitem__(self, part: Any) -> Tensor:
            with reading(), safe_open(self.file, "pt") as file:
                return file.get_slice(self.name)[part]

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

    codes: dict[int, tuple[LazyArray, Tensor]] = {}  # by the storage of what stands for them, which stays there

    def stand_in(array: LazyArray, device: Any) -> Tensor:
        scalar = torch.zeros((), dtype=array.dtype, device=device)
        codes[storage_of(scalar)] = array, scalar
        return scalar.expand(array.shape)

    def deferred(pool: Any, tensor: Any, device: Any = None, dtype: torch.dtype | None = None, tensor_idx: Any = None,
                 **options: Any) -> Callable[[], Any]:
        if tensor_idx is None and isinstance(tensor, Name) and dtype is not None and tensor.get_shape():
            return lambda: tensor.lazy(dtype)
        if isinstance(tensor, Name) and tensor.get_dtype() == "U8" and tensor.get_shape()[1:] == [1]:
            return lambda: stand_in(tensor.lazy(torch.uint8), device)
        return materialize(None, tensor, device, dtype, tensor_idx=tensor_idx, **options)

    def set_param(model: nn.Module, name: str, value: Any, *others: Any) -> None:
        path, _, own = name.rpartition(".")
        before = getattr(model.get_submodule(path), own)
        if isinstance(before, nn.Parameter) and before.ndim:
            stands_for, _ = codes.get(storage_of(value), (None, None)) if isinstance(value, Tensor) else (None, None)
            value = wait(value, stands_for)
        elif isinstance(value, LazyArray):
            value = value.over_first(slice(None))
        put(model, name, value, *others)

    with (_put(modeling_utils, "safe_open", File), _put(core_model_loading, "spawn_materialize", deferred),
          _put(core_model_loading, "set_param_for_module", set_param),
          _put(modeling_utils, "_tied_params_are_equal", lambda one, other: equal(values(one), values(other))),
          _put(modeling_utils, "caching_allocator_warmup", lambda *_: None)):
        yield


@contextmanager
def quantising(chosen: Callable[[str, Tensor], bool], from_mxfp4: bool,
               wait: Callable[[Any, nn.Module | None, Any], nn.Parameter] | None = None) -> Iterator[dict[str, Any]]:
    """from_pretrained, asked for 4 bits, quantises these parameters too, each as soon as it is read.

    Gives what will hold bitsandbytes' `QuantState` of each, by name. The class of `AUTO_QUANTIZER_MAPPING` is another
    one meanwhile, with `param_needs_quantization` and `get_quantize_ops`, whose result has `convert`.

    Args:
        chosen: Whether a parameter is one of them, by its name and what it is before it is read.
        from_mxfp4: Files hold MXFP4, which its own quantiser's `get_weight_conversions` read into numbers.
        wait: While `reading_parts`: makes the stand-in of a matrix [out, in] that has not been read, or of `chosen`
            [E, ...], given the layer of a linear one, and the settings (BitsAndBytesConfig).
    """
    from transformers import Mxfp4Config
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    states: dict[str, Any] = {}

    class Quantize(Bnb4bitQuantize):
        def convert(self, input_dict: dict[str, Any], model: nn.Module | None = None, **kwargs: Any) -> dict[str, Any]:
            from bitsandbytes.nn import Params4bit

            found, settings = {}, self.hf_quantizer.quantization_config
            for name, value in input_dict.items():
                value = value[0] if isinstance(value, list) else value
                if isinstance(value, LazyArray):
                    layer = None if chosen(name, model.get_parameter(name)) else model.get_submodule(
                        name.rpartition(".")[0])
                    if layer is not None:
                        layer._is_hf_initialized = True
                        value = value.transposed() if issubclass(layer.source_cls, Conv1D) else value
                    found[name] = wait(value, layer, settings)
                    if layer is None:
                        states[name] = found[name].quant_state
                    continue
                if not chosen(name, model.get_parameter(name)):
                    found |= super().convert({name: value}, model=model, **kwargs)
                    continue
                found[name] = Params4bit(
                    value, requires_grad=False, quant_type=settings.bnb_4bit_quant_type,
                    compress_statistics=settings.bnb_4bit_use_double_quant,
                    quant_storage=settings.bnb_4bit_quant_storage).to(value.device)
                states[name] = found[name].quant_state
            return found

    class Quantizer(AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"]):
        def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
            module, _, name = param_name.rpartition(".")
            parameter = model.get_submodule(module)._parameters.get(name)
            is_chosen = parameter is not None and not self.pre_quantized and chosen(param_name, parameter)
            return is_chosen or super().param_needs_quantization(model, param_name, **kwargs)

        def get_quantize_ops(self) -> Quantize:
            return Quantize(self)

        def get_weight_conversions(self) -> list[Any]:
            if not from_mxfp4:
                return super().get_weight_conversions()
            reader = AUTO_QUANTIZER_MAPPING["mxfp4"](Mxfp4Config(dequantize=True), pre_quantized=True)
            return reader.get_weight_conversions()

    before, AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"], Quantizer
    try:
        yield states
    finally:
        AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = before


@contextmanager
def without_first_weights() -> Iterator[None]:
    """Models of transformers that are made keep what their parts started with, and are not tied: `init_weights`.

    `initialization.no_init_weights` takes away the parts' own start too, which some architectures keep.
    """
    with _in_place_of("init_weights", lambda _: lambda model: None):
        yield


@contextmanager
def around_missing_weights(start: Callable[[nn.Module, Callable[[], None]], None]) -> Iterator[None]:
    """`start` is called where from_pretrained draws the weights that its files lack: `initialize_weights`.

    Args:
        start: Takes the model and what draws its weights, which spares those that the files hold.
    """
    with _in_place_of("initialize_weights", lambda original: lambda model: start(model, lambda: original(model))):
        yield


@contextmanager
def before_each_module(enter: Callable[[nn.Module], None]) -> Iterator[None]:
    """`enter` is called with each module before its model draws its weights: `_initialize_weights`."""
    def entered(original: Callable) -> Callable:
        def initialize(model: nn.Module, module: nn.Module, *args: Any) -> None:
            enter(module)
            original(model, module, *args)

        return initialize

    with _in_place_of("_initialize_weights", entered):
        yield


@contextmanager
def instead_of_truncated_normals(draw: Callable[[Tensor, float, float, float], None]) -> Iterator[None]:
    """`draw` is called where a model draws from a truncated normal distribution: `initialization.trunc_normal_`.

    What a file holds is spared as there: `_is_hf_initialized`.

    Args:
        draw: Takes the parameter, mean, standard deviation, and how many of these the ends are from the mean. Of other
            ends the original function draws.
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
def _in_place_of(method: str, replacement: Callable[[Callable], Callable]) -> Iterator[None]:
    from transformers import PreTrainedModel

    with _put(PreTrainedModel, method, replacement(getattr(PreTrainedModel, method))):
        yield


@contextmanager
def _put(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
