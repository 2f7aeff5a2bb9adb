"""Whom `chat` talks to: a run, one of its checkpoints, a model folder or a hub id, and how it is to be asked."""

import importlib
import json
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lmmods.commands import declarations
from lmmods.commands.argument_parser import Parser
from lmmods.commands.exported_model import model_block
from lmmods.commands.trust import check_remote_code, guarded_imports, is_trusted
from lmmods.core import hub
from lmmods.core.adapters import SETTINGS, adapter_config
from lmmods.core.console import tell
from lmmods.core.errors import UserError
from lmmods.core.files import read_text
from lmmods.core.generation_config import BOOKKEEPING, GENERATION_CONFIG, SAMPLING
from lmmods.core.recipes import read_recipe
from lmmods.core.settings import Generation
from lmmods.core.task_fields import CausalFields, Quantize
from lmmods.data.sources.conversation import Message, RowProblem
from lmmods.data.sources.formats import find_format
from lmmods.runs.folder import RunFolder

CHAT, TEXT = "messages", "text"  # layouts of rows: turns, and whole texts
NO_ROWS = "none"  # source of a data module that reads none
# Of generation_config.json: what is used in another way, or says nothing of the text.
USED_ELSEWHERE = {*BOOKKEEPING, "eos_token_id", "bos_token_id", "pad_token_id", "max_length", "early_stopping",
                  "output_attentions", "output_hidden_states", "return_dict_in_generate", "cache_implementation"}


@dataclass
class Source:
    """What is talked to, before it is loaded.

    Args:
        title: What it is, in words.
        model: What its network is made of.
        data: The data module that writes its prompts and knows its tokens.
        layout: Of the rows that it was trained on; None for language models, which go on with texts.
        generation: As its recipe, or its generation_config.json, says it.
        stop_token_ids: Tokens that end an answer.
        precision: Of the run; None where there is no run.
        seed: Of the run.
        checkpoint: Whose weights are taken; None takes those of `model`.
        frozen: Whether it may be stored in the narrower types of a model that never trains.
        base: What it was trained from, to compare; None where that is not known.
    """

    title: str
    model: CausalFields
    data: Any
    layout: str | None
    generation: Generation
    stop_token_ids: list[int]
    engine: str = "torch"
    precision: str | None = None
    seed: int = 0
    checkpoint: Path | None = None
    frozen: bool = False
    base: CausalFields | None = None

    @property
    def is_chat(self) -> bool:
        """Whether it knows turns; otherwise it goes on with whatever text it is given."""
        return self.layout is not None and find_format(self.layout).template is None

    @cached_property
    def _encoder(self) -> Any:
        return self.data.prompt_encoder(self.layout)

    def encode(self, messages: list[Message]) -> list[int]:
        """Token ids of the prompt of a conversation. Raises UserError: its template cannot write it."""
        if self.layout is None:
            return self.data.encode_prompts([messages[-1]["content"]])[0]
        try:
            return self._encoder.prompts([messages])[0]
        except RowProblem as problem:
            raise UserError(f"This conversation cannot be written: {problem}.") from problem


# A run -------------------------------------------------------------------------------------------------------------


def read_run(run: str, ckpt_path: str | None) -> Source:
    """A run's model, or one of its checkpoints. Raises UserError: no run of a causal model, or no model yet."""
    folder = RunFolder(run)
    if not folder.config.is_file():
        is_model = any((folder.root / name).is_file() for name in ("config.json", SETTINGS))
        raise UserError(f"--run {run}: there is no config.yaml, so this is not a run folder."
                        + (f" It is a model folder: --model {run}" if is_model else ""))
    options = model_block(run, "chat")["init_args"]
    check_remote_code(options)
    model, declared = _blocks(run, folder)
    model.compile, model.gradient_checkpointing = False, False  # which serve training alone
    data = _data_module(declared)
    checkpoint = folder.resolve(ckpt_path) if ckpt_path is not None else None
    recipe = read_recipe(folder.config)
    exported = model if checkpoint else _exported(run, folder, model)
    if checkpoint:
        from lmmods.runs.checkpoint_format import read_plain

        data.go_on_from(read_plain(checkpoint))
    else:
        data.tokenizer = str(folder.model)
    _connect(data, model)
    trainer = recipe.get("trainer") if isinstance(recipe.get("trainer"), dict) else {}
    return Source(_title(str(checkpoint or folder.model), model), exported, data, _layout(folder, declared),
                  model.generation, data.stop_token_ids, recipe.get("engine", "torch"),
                  trainer.get("precision", "32-true"), _seed(recipe), checkpoint,
                  base=without_training(model) if model.pretrained else None)


def _title(name: str, model: CausalFields) -> str:
    quantized = f" in {model.quantize}" if model.quantize else ""
    return f"{name}, an adapter on {model.pretrained}{quantized}" if model.trains_adapter else f"{name}{quantized}"


def without_training(model: CausalFields) -> CausalFields:
    """The model that a run starts from, which may be quantised without an adapter as nothing of it trains."""
    start = replace(model, lora=None, quantize=model.quantize if model.adapter else None)
    start.quantize = model.quantize
    return start


def _blocks(run: str, folder: RunFolder) -> tuple[CausalFields, Any]:
    """The blocks `model` and `data` of config.yaml as the fields that they declare."""
    recipe = read_recipe(folder.config)
    parser = Parser(prog="train.py chat")
    for key, base in (("model", declarations.TaskModule), ("data", declarations.DataModule)):
        parser.add_subclass(base, key)
    with guarded_imports((declarations.__name__, "lmmods.core.settings", "lmmods.data.sources.source")):
        config = parser.parse_object({key: recipe.get(key) for key in ("model", "data")})
    made = parser.instantiate_classes(config)
    if not isinstance(made.model, CausalFields):
        raise UserError(f"--run {run}: config.yaml is not of a run of SFT, CLM or Preference.")
    return made.model, made.data


def _data_module(declared: Any) -> Any:
    """The data module of declared fields, which reads no rows for this."""
    name = type(declared).__name__
    kind = getattr(importlib.import_module(f"lmmods.data.{name.removesuffix('Data').lower()}"), name)
    return kind(**{item.name: getattr(declared, item.name) for item in fields(declared)})


def _connect(data: Any, model: CausalFields) -> None:
    data.connect(pretrained=model.pretrained, revision=model.revision, trust_remote_code=model.trust_remote_code)


def _exported(run: str, folder: RunFolder, model: CausalFields) -> CausalFields:
    """What model/ is made of."""
    if (folder.model / SETTINGS).exists():
        return replace(model, lora=None, adapter=str(folder.model))
    if not (folder.model / "config.json").is_file():
        raise UserError(f"--run {run}: there is no model in {folder.model}; the run must have finished."
                        + (" A checkpoint can be asked: --ckpt_path last" if folder.names() else ""))
    return replace(model, pretrained=str(folder.model), config=None, config_overrides=None, revision=None)


def _layout(folder: RunFolder, declared: Any) -> str | None:
    """The layout of the training rows, from the report on them; turns where it is not known."""
    if isinstance(declared, declarations.CLMData):
        return None
    try:
        sources = json.loads(folder.data_report.read_text(encoding="utf-8"))["sources"]
        return next(iter(sources.values()))["format"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
        return declared.dataset_format or CHAT


def _seed(recipe: dict[str, Any]) -> int:
    seed = recipe.get("seed_everything")
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else 0


# A model -----------------------------------------------------------------------------------------------------------


def read_model(name: str, template: str | None, template_kwargs: dict[str, Any] | None, quantize: Quantize | None
               ) -> Source:
    """A folder or hub id of a model or an adapter. Raises UserError: it is neither, or no causal LM."""
    if (Path(name) / "config.yaml").is_file() and (Path(name) / "checkpoints").is_dir():
        raise UserError(f"--model {name} is a run folder: --run {name}")
    adapter = _file_of(name, SETTINGS)
    base = adapter_config(adapter.parent, f"--model {name}").get("base_model_name_or_path") if adapter else None
    if adapter and not base:
        raise UserError(f"--model {name}: {SETTINGS} does not say what the adapter's base model is.")
    model = CausalFields(pretrained=base or name, adapter=name if adapter else None,
                         trust_remote_code=is_trusted())
    model.quantize = quantize
    _check_causal(model)
    tokenizer = name if _file_of(name, "tokenizer_config.json") else model.pretrained
    data = _data_of(tokenizer, model, template, template_kwargs)
    said = _fields_of(name, GENERATION_CONFIG) or _fields_of(model.pretrained, GENERATION_CONFIG)
    ends = said.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    layout = CHAT if type(data).__name__ == "SFTData" else None
    ends = sorted({*data.stop_token_ids, *ends})  # the first finds out whether the template is one
    return Source(_title(name, model), model, data, layout, _generation(said), ends, frozen=True,
                  base=without_adapter(model) if adapter else None)


def without_adapter(model: CausalFields) -> CausalFields:
    """The base of an adapter."""
    base = replace(model, adapter=None, quantize=None)
    base.quantize = model.quantize
    return base


def _check_causal(model: CausalFields) -> None:
    from lmmods.core.hf_config import load_config

    kinds = load_config(model.pretrained, trust_remote_code=model.trust_remote_code).architectures or []
    if kinds and not any(kind.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for kind in kinds):
        raise UserError(f"--model {model.pretrained} is a {kinds[0]}; chat takes causal language models.")


def _data_of(tokenizer: str, model: CausalFields, template: str | None, template_kwargs: dict[str, Any] | None) -> Any:
    """A data module for chats where there is a template, for texts otherwise."""
    from lmmods.data.clm import CLMData
    from lmmods.data.sft import SFTData

    data = SFTData(NO_ROWS, tokenizer=tokenizer, template=template, chat_template_kwargs=template_kwargs)
    _connect(data, model)
    if template or data.tokenizer.chat_template:
        return data
    if template_kwargs:
        raise UserError(f"--chat_template_kwargs: {tokenizer} has no chat template.")
    data = CLMData(NO_ROWS, tokenizer=tokenizer)
    _connect(data, model)
    return data


def _file_of(name: str, file: str) -> Path | None:
    """A file of a folder or of a hub repository, downloaded where it must be; None where it has no such file.

    Raises:
        UserError: The hub does not answer.
    """
    if Path(name).is_dir():
        return Path(name) / file if (Path(name) / file).exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        with hub.loading("--model", name, missing=()):
            return Path(hf_hub_download(name, file))
    except EntryNotFoundError:  # nor is it cached: who loads the model tells more where that is a reason
        return None


def _fields_of(name: str, file: str) -> dict[str, Any]:
    """What a JSON file of a model says, nothing where it has none. Raises UserError: it cannot be read."""
    path = _file_of(name, file)
    try:
        return dict(json.loads(read_text(path))) if path else {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"--model {name}: {path} cannot be read ({error}). Mend or remove it.") from error


def _generation(said: dict[str, Any]) -> Generation:
    """The settings of generation_config.json that this program knows; names those that it does not."""
    known = {item.name for item in fields(Generation)}
    said = {key: value for key, value in said.items() if value is not None}
    if not said.get("do_sample"):
        said = {key: value for key, value in said.items() if key not in SAMPLING}
    if left := sorted(said.keys() - known - USED_ELSEWHERE):
        tell(f"{GENERATION_CONFIG} says {', '.join(left)}, which is not used here.")
    return Generation(**{key: value for key, value in said.items() if key in known})
