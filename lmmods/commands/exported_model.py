"""Load a finished run for other commands: base model, adapter and tokenizer, on torch."""

import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

from lmmods.core.adapters import SETTINGS, adapter_config, adapter_weights
from lmmods.core.errors import UserError
from lmmods.core.image_models import IMAGES_AUTO_CLASS
from lmmods.recipe.classes import declared, implementation, tasks_that_write
from lmmods.recipe.files import read_recipe
from lmmods.recipe.objects import objects
from lmmods.recipe.reader import parse
from lmmods.recipe.tasks.base import DataFields, TaskFields
from lmmods.recipe.trust import check_remote_code
from lmmods.runs.folder import RunFolder

Fields = TypeVar("Fields", bound=TaskFields)


@dataclass
class FinishedRun:
    """Output of a finished run of either engine.

    Args:
        task: Name of the task's class.
        seed: Seed of weights that are in neither base nor adapter, such as the head of a masked LM on a bare encoder.
        has_adapter: True if model/ is an adapter, False if it is a whole model.
        pretrained: Base model of the adapter. The fields that follow are those it was loaded with.
    """

    folder: RunFolder
    task: str
    seed: int
    has_adapter: bool
    pretrained: str | None
    config_overrides: dict[str, Any]
    revision: str | None
    trust_remote_code: bool
    quantize: str | None
    double_quant: bool
    all_parts: bool = False

    @classmethod
    def read(cls, run: str, command: str, tasks: list[str] | None = None) -> "FinishedRun":
        """Read a run folder. Raises UserError: it has no run, the run is not finished, or its task is not supported.

        Args:
            command: Name of the command, for messages.
            tasks: Supported tasks. Default: those that generate text.
        """
        folder = RunFolder(run)
        if not folder.config.is_file():
            raise UserError(f"--run {run} has no config.yaml, so it is not a run folder. Use a run folder.")
        has_adapter = (folder.model / SETTINGS).exists()
        if not has_adapter and not (folder.model / "config.json").is_file():
            raise UserError(f"--run {run} has no model in {folder.model}. Use a finished run.")
        if has_adapter:
            adapter_config(folder.model, f"--run {run}")
            adapter_weights(folder.model, f"--run {run}")
        model = model_block(run, command, tasks)
        options = model["init_args"]
        check_remote_code(options)
        # A principal adapter is exported for the original model, not for the quantised base that it was trained on.
        is_principal = has_adapter and (options.get("lora") or {}).get("init") == "pissa"
        task = model["class_path"].rsplit(".", 1)[-1]
        seed = read_recipe(folder.config).get("seed_everything")
        return cls(folder, task, seed if type(seed) is int else 0, has_adapter, options.get("pretrained"),
                   options.get("config_overrides") or {}, options.get("revision"),
                   bool(options.get("trust_remote_code")), None if is_principal else options.get("quantize"),
                   bool(options.get("double_quant", True)), bool(options.get("images")))

    @property
    def writes(self) -> bool:
        """True if the model writes text."""
        return self.task in tasks_that_write()

    @property
    def auto_class(self) -> str:
        """Name of transformers' class that loads the model."""
        return IMAGES_AUTO_CLASS if self.all_parts else declared("model")[self.task].auto_class

    @cached_property
    def network_fields(self) -> dict[str, Any]:
        """Fields of the base's configuration that the recipe or the rows change, such as the names of labels.

        Raises:
            UserError: The labels are not in a checkpoint, and the training rows cannot be read.
        """
        if self.writes:
            return self.config_overrides
        from lmmods.runs.checkpoint import read_plain

        model, data_fields = read_blocks(self.folder)
        data = data_module(data_fields)
        if (checkpoint := self.folder.find("last")) is not None:
            data.resume_from(read_plain(checkpoint))
        return {**(model.overrides or {}), **data.network_fields}

    def tokenizer(self):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder.model, trust_remote_code=self.trust_remote_code)

    def load(self, quantize: str | None, precision: str = "32-true", device: str | None = None):
        """Load the base of the adapter, or the whole model, in evaluation mode, optionally quantised.

        Args:
            precision: Lightning's name of the precision.
            device: Target device; None is the CPU.
        """
        import torch
        import transformers

        from lmmods.core.hf_config import set_special_ids
        from lmmods.torch_engine.nn.loading import load_pretrained, resize_embeddings

        source = {"pretrained": self.pretrained, "overrides": self.network_fields, "revision": self.revision
                  } if self.has_adapter else {"pretrained": str(self.folder.model)}
        auto_class = getattr(transformers, self.auto_class)
        model = load_pretrained(auto_class, **source, trust_remote_code=self.trust_remote_code, quantize=quantize,
                                double_quant=self.double_quant, precision=precision, frozen=True, seed=self.seed,
                                device=torch.device(device) if device else None,
                                adapter=self.folder.model if self.has_adapter else None, all_parts=self.all_parts)
        tokenizer = self.tokenizer()
        resize_embeddings(model, len(tokenizer))
        if not self.writes:  # a decoder is pooled at the last token that is not padding
            set_special_ids(model.config, tokenizer, is_causal=False)
        return (model if device is None or quantize or self.saved_quantization() else model.to(device)).eval()

    def with_adapter(self, base):
        """Return the base with the run's adapter, if any, attached. Raises UserError: the adapter does not fit."""
        from lmmods.torch_engine.nn.lora import load_adapter

        return load_adapter(base, self.folder.model, self.option).eval() if self.has_adapter else base

    @property
    def option(self) -> str:
        """Command-line option that named the run, for messages."""
        return f"--run {self.folder.root}"

    def config(self):
        """Return the configuration of the adapter's base, or of the whole model."""
        from lmmods.core.hf_config import load_config

        if not self.has_adapter:
            return load_config(str(self.folder.model), trust_remote_code=self.trust_remote_code,
                               all_parts=self.all_parts)
        return load_config(self.pretrained, None, self.revision, self.trust_remote_code, all_parts=self.all_parts)

    def saved_quantization(self) -> str | None:
        """Return the quantisation method of the saved base; None if it loads as plain weights."""
        from lmmods.core.hf_config import MXFP4, saved_quantization

        if not self.has_adapter:
            return None
        saved = saved_quantization(self.config())
        return None if saved == MXFP4 else saved

    def unpack(self):
        """Load a base that is saved quantised, with dequantised weights."""
        import transformers

        quantised = self.load(None)
        config = copy.deepcopy(quantised.config)
        del config.quantization_config
        auto_class = getattr(transformers, self.auto_class)
        model = auto_class.from_config(config, trust_remote_code=self.trust_remote_code).eval()
        weights = model.state_dict()
        for name, tensor in quantised.state_dict().items():
            if name in weights and weights[name].shape == tensor.shape and tensor.is_floating_point():
                weights[name].copy_(tensor)
        copy_dequantized(quantised, model)
        return model


def model_block(run: str, command: str, tasks: list[str] | None = None) -> dict[str, Any]:
    """Return the `model` block of a run's config.yaml. Raises UserError: it is missing, or its task is not supported.

    Args:
        command: Name of the command, for messages.
        tasks: Supported tasks. Default: those that generate text.
    """
    model = read_recipe(RunFolder(run).config).get("model")
    if not (isinstance(model, dict) and isinstance(model.get("class_path"), str)
            and isinstance(model.get("init_args"), dict)):
        raise UserError(f"--run {run}: config.yaml has no model with class_path and init_args, so no run wrote it. "
                        "Use a run folder.")
    *others, last = tasks_that_write() if tasks is None else tasks
    if model["class_path"].rsplit(".", 1)[-1] not in (*others, last):
        raise UserError(f"--run {run}: its task is {model['class_path']}, which {command} does not support. Use a run "
                        f"of {', '.join(others)} or {last}.")
    return model


def read_blocks(folder: RunFolder) -> tuple[TaskFields | None, DataFields | None]:
    """Read `model` and `data` of a run's config.yaml into their fields; None for a user's own class."""
    parsed = parse(["predict", "--config", str(folder.config)], {}, checked=False)
    return tuple(cls and cls(**objects(cls, parsed.explicit[block]))  # type: ignore[return-value]
                 for block, cls in parsed.classes.items())


def exported_fields(folder: RunFolder, model: Fields) -> Fields | None:
    """Return the fields that load the exported model/ of a run; None if it does not exist yet."""
    if (folder.model / SETTINGS).exists():
        # Without a principal adapter's quantised base, as in `FinishedRun.read`.
        quantize = model.quantize if model.starts_at_base else None
        return replace(model, lora=None, adapter=str(folder.model), quantize=quantize)
    if not (folder.model / "config.json").is_file():
        return None
    return replace(model, pretrained=str(folder.model), config=None, config_overrides=None, revision=None)


def data_module(data_fields: DataFields) -> Any:
    """Build the data module for fields of `data`, without reading rows."""
    module_class = implementation(type(data_fields), "lmmods.data")
    return module_class(**{item.name: getattr(data_fields, item.name) for item in fields(data_fields)})


def copy_dequantized(quantized, model) -> None:
    """Copy the dequantised weights of `quantized` into `model`."""
    import bitsandbytes as bnb

    from lmmods.torch_engine.compat.bitsandbytes import matrix_of
    from lmmods.torch_engine.nn.experts import packed_parameter_names

    modules = dict(model.named_modules())
    for name in packed_parameter_names(quantized):
        module, _, attribute = name.rpartition(".")
        parameter = getattr(modules[module], attribute)
        parameter.data = getattr(quantized.get_submodule(module), attribute).to(parameter.dtype)
    for name, module in quantized.named_modules():
        if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            modules[name].weight.data = matrix_of(module, modules[name].weight.dtype)
