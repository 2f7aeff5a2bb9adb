"""transformers' configurations, for both engines: loading, overriding and reading them."""

import ast
import copy
import difflib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmmods.core import hub
from lmmods.core.errors import UserError, first_line, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# Classes of transformers whose models generate text.
TEXT_WRITERS = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
# Fields of a configuration that the data modules need.
FIELDS = ("model_type", "max_position_embeddings", "pad_token_id", "type_vocab_size")
# Rows of the table of per-layer embeddings (Gemma 4), which tokens index as they do the embedding's.
PER_LAYER_VOCABULARY = "vocab_size_per_layer_input"
# In RoBERTa and its relatives positions start at the padding token's id + 1.
COUNT_FROM_PADDING = ("roberta", "camembert", "data2vec-text", "mpnet", "longformer")


def load_config(source: str | dict[str, Any], overrides: dict[str, Any] | None = None, revision: str | None = None,
                trust_remote_code: bool = False, defaults: dict[str, Any] | None = None, all_parts: bool = False
                ) -> Any:
    """Load the configuration of a model and override fields; for a checkpoint with images or sound, of its text part.

    Args:
        source: Folder or hub id of a model or configuration, or `{model_type: llama, hidden_size: 256, ...}`.
        overrides: Fields to override.
        defaults: Fields that a mapping may omit (`vocabulary_fields`).
        all_parts: Return the configuration of the whole checkpoint.

    Raises:
        UserError: There is no such model, the type or a field is unknown, or the type rejects a value.
    """
    if isinstance(source, dict):
        # A copy, because transformers fills defaults into nested mappings.
        return _new_config(copy.deepcopy({**(defaults or {}), **source, **(overrides or {})}))
    config = _read_config(source, revision, trust_remote_code)
    config = config if all_parts else text_part(config) or config
    for name in overrides or {}:
        if all_parts and name in config.sub_configs:
            raise UserError(f"model.config_overrides.{name}: fields of a part of a model cannot be overridden with "
                            "model.images. Remove it.", "model.config_overrides")
    for name, value in (overrides or {}).items():
        owner, field = _find_field(config, name)
        _check_fields(owner, {field: value}, "model.config_overrides")
    from huggingface_hub.errors import StrictDataclassError

    for name, value in (overrides or {}).items():
        if name in ROPE_FIELDS and hasattr(config, "rope_parameters"):
            # Merged with the present value: setting the field alone would lose the model's `KEPT`.
            name, value = "rope_parameters", rope_with(config, name, value)
        try:
            setattr(*_find_field(config, name), value)
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise UserError(f"model.config_overrides.{name}: {one_line(error)}") from error
    # Check after all fields are set, as each may be valid only together with the others.
    if overrides and not set(ROPE_FIELDS).isdisjoint(overrides):
        check_rope(config)
    return config


def _find_field(config: Any, name: str) -> tuple[Any, str]:
    """Return the configuration that has a field, and the field's name in it; `part.field` is a field of a part."""
    part, _, field = str(name).rpartition(".")
    return (getattr(config, part), field) if part in config.sub_configs else (config, name)


def dropout_rates(config: "PreTrainedConfig", all_parts: bool = False) -> list[str]:
    """Return the names of the configuration's dropout rates above 0; `all_parts` includes the rates of its parts."""
    names = [name for name, value in vars(config).items() if "drop" in name and isinstance(value, float) and value > 0]
    # Gemma 4 has a part for sound in some sizes only.
    parts = [part for part in config.sub_configs if getattr(config, part) is not None] if all_parts else []
    return names + [f"{part}.{name}" for part in parts for name in dropout_rates(getattr(config, part))]


def _read_config(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise UserError(f"model.pretrained: {name} has no config.json, so it is not a model folder. "
                        "Use a folder written by save_pretrained, or a hub id.")
    try:
        with hub.loading("model.pretrained", name, revision=revision):
            return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (StrictDataclassError, OSError, ValueError, KeyError) as error:
        if Path(name).exists():
            raise UserError(f"model.pretrained: {Path(name) / 'config.json'} cannot be used: {one_line(error)}"
                            ) from error
        raise no_model(name, error) from error


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints of text and other inputs, such as images: only the text network inside is loaded.

# Names in their files (patterns) -> names in the text network. Older files have the first two.
TEXT_NAMES = {r"^language_model\.lm_head\.": "lm_head.", r"^language_model\.model\.": "model.",
              r"^model\.language_model\.": "model."}
_HEADS_FOR_TEXT = ("ForConditionalGeneration", "ForCausalLM")


def text_part(config: "PreTrainedConfig") -> Any | None:
    """Return the configuration of the text network inside a checkpoint that takes other inputs too.

    None if it takes only text, if transformers has no causal model of the text alone, or if the checkpoint has a head
    for labels.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text: Any = getattr(config, "text_config", None)
    if getattr(text, "model_type", None) not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    if not all(name.endswith(_HEADS_FOR_TEXT) for name in config.architectures or ()):
        return None
    text = copy.deepcopy(text)
    # transformers uses the whole checkpoint's field, and text_config may have another default.
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    if (saved := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = saved
    return text


def parts_left_out(name: str, revision: str | None = None, trust_remote_code: bool = False) -> list[str]:
    """Return the parts of a checkpoint that are not loaded, such as `vision`; [] if all of it is a text network."""
    config = _read_config(name, revision, trust_remote_code)
    if text_part(config) is None:
        return []
    return sorted(key.removesuffix("_config") for key in config.sub_configs
                  if key != "text_config" and getattr(config, key, None) is not None)


def text_note(name: str, parts: list[str], model_type: str) -> str:
    """Return the message about the parts of a checkpoint that are omitted."""
    return (f"{name} has parts other than text ({', '.join(parts)}): only its text model ({model_type}) is "
            "loaded and saved, without them.")


def is_of_text_part(name: str) -> bool:
    """True for the name of a weight of the text network in a checkpoint with other parts, except a plain `lm_head`."""
    return any(re.match(old, name) for old in TEXT_NAMES)


def text_name(name: str) -> str | None:
    """Return the text network's name of a weight in a checkpoint with other parts; None for a weight of those parts."""
    converted = next((re.sub(old, new, name) for old, new in TEXT_NAMES.items() if re.match(old, name)), name)
    return converted if is_of_text_part(name) or name.startswith("lm_head.") else None


def no_model(name: str, error: Exception) -> UserError:
    """Build the error for a model that is neither a folder nor found on the hub."""
    return UserError(f"model.pretrained: there is no folder {name!r}, and as a hub id it cannot be loaded: "
                     f"{first_line(error)}")


def _new_config(fields: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UserError(f"model.config.model_type is {model_type!r}, which transformers does not support. "
                        "Examples: gpt2, llama, bert.")
    config_class = CONFIG_MAPPING[model_type]
    if "vocab_size" in fields and hasattr(config_class, PER_LAYER_VOCABULARY):
        fields.setdefault(PER_LAYER_VOCABULARY, fields["vocab_size"])
    _check_fields(config_class(), fields, "model.config")
    try:
        config = config_class(**fields)  # all at once: head sizes are derived from other fields
    except (StrictDataclassError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"model.config: {config_class.__name__} does not accept these fields: {one_line(error)}"
                        ) from error
    check_rope(config)
    return config


def _check_fields(config: "PreTrainedConfig", fields: dict[str, Any], key: str) -> None:
    """Raise UserError for a field that the model does not read; transformers would accept a misspelt one silently.

    Args:
        key: Recipe key that sets the fields.
    """
    unknown = [name for name in fields if not hasattr(config, str(name))
               and not (name in OLDER and hasattr(config, "rope_parameters"))]
    if not unknown:
        return
    read = fields_read(type(config))
    for name in unknown:
        if name not in read:
            near = difflib.get_close_matches(str(name), {*vars(config), *config.attribute_map, *read}, 1)
            raise UserError(f"{key}: {type(config).__name__} has no field {name!r}."
                            + (f" Did you mean {near[0]}?" if near else ""))


def fields_read(config_class: type) -> set[str]:
    """Return the names that the code of a model type reads from its configuration, even if its class lacks them.

    Many models read `head_dim`, which only some of their classes declare. The names are read from the source code, as
    importing it would import torch.

    Args:
        config_class: Class of the configuration. The code of the model is in the file next to it.
    """
    path = Path(inspect.getfile(config_class))
    code = path.with_name(path.name.replace("configuration_", "modeling_"))
    if not code.is_file():
        return set()
    tree = ast.parse(code.read_text(encoding="utf-8"))
    # Heads that transformers shares between model types.
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                and (node.module or "").endswith("modeling_layers") for alias in node.names}
    from transformers import configuration_utils

    shared = ast.parse(Path(configuration_utils.__file__).with_name("modeling_layers.py").read_text(encoding="utf-8"))
    parts = [tree, *(node for node in shared.body if isinstance(node, ast.ClassDef) and node.name in imported)]
    names = set()
    for node in (node for part in parts for node in ast.walk(part)):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            names.add(node.attr)  # config.head_dim
        elif (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
              and _is_config(node.args[0]) and isinstance(node.args[1], ast.Constant)):
            names.add(str(node.args[1].value))  # getattr(self.config, "head_dim", None)
    return names


def _is_config(node: ast.expr) -> bool:
    return (node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")) in ("config", "text_config")


def known_fields(config: "PreTrainedConfig") -> dict[str, Any]:
    """Return the fields of `FIELDS` that a configuration has, with their values."""
    # Configurations of several parts (text and images) nest these fields.
    text = config.get_text_config()
    return {field: getattr(text, field) for field in FIELDS if hasattr(text, field)}


def layer_config(config: "PreTrainedConfig", layer: int) -> Any:
    """Return the configuration of a layer, as layers may differ in the sizes of their heads."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def position_limit(fields: dict[str, Any]) -> int | None:
    """Return the maximum sequence length of a configuration with these fields; None if it sets no limit."""
    positions = fields.get("max_position_embeddings", fields.get("n_positions"))
    if positions and any(kin in fields.get("model_type", "") for kin in COUNT_FROM_PADDING):
        # The rows of the table up to the padding token's id are never used; transformers' default id is 1.
        return positions - (1 if fields.get("pad_token_id") is None else fields["pad_token_id"]) - 1
    return positions


def tells_token_types(fields: dict[str, Any]) -> bool:
    """Return True if a model of this configuration uses `token_type_ids`, for example to tell question from context.

    DistilBERT and decoders do not, whatever their tokenizer returns; RoBERTa has a single type.

    Args:
        fields: `model_type` and the fields that are set; the others have the type's defaults.
    """
    from transformers import CONFIG_MAPPING

    model_type = str(fields.get("model_type"))
    if model_type not in CONFIG_MAPPING or model_type == "xlnet":  # remote code; types without an embedding table
        return True
    default = getattr(CONFIG_MAPPING[model_type](), "type_vocab_size", None)  # other types may have an unused field
    return default is not None and fields.get("type_vocab_size", default) > 1


def special_ids(tokenizer: "PreTrainedTokenizerBase", is_causal: bool) -> dict[str, int | None]:
    """Return the ids of the start, end and padding tokens for a configuration.

    If a causal model pads with a token that has another role too, `pad_token_id` is None: torch would never train the
    embedding of the padding token, and that other role needs it.
    """
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
    if is_causal and ids["pad_token_id"] in (ids["bos_token_id"], ids["eos_token_id"], tokenizer.unk_token_id):
        ids["pad_token_id"] = None
    return ids


def set_special_ids(config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerBase", is_causal: bool) -> None:
    """Set the ids of a tokenizer's start, end and padding tokens in a configuration."""
    for name, token in special_ids(tokenizer, is_causal).items():
        if token is not None:
            setattr(config, name, token)


def new_rows_message(num_tokens: int, num_rows: int) -> str:
    """Return the message for an embedding of `num_rows` rows that grows to the tokens of a tokenizer."""
    return (f"The tokenizer has {num_tokens} tokens, the model {num_rows}: {num_tokens - num_rows} rows are added, "
            "each the mean of the old ones.")


def some(names: list[str], limit: int = 8) -> str:
    """Return the first few of many names, as text."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def loading_notes(pretrained: str, missing: list[str], unneeded: list[str]) -> list[str]:
    """Return the messages about weights that only the model or only its files have.

    Args:
        missing: Names of weights of a head that the files lack.
        unneeded: Names of weights in the files that the model lacks.
    """
    return [*([f"Not needed from {pretrained}: {some(sorted(unneeded))}."] if unneeded else []),
            *([f"Not in {pretrained}, so these are initialised randomly: {some(sorted(missing))}."] if missing else [])]


def vocabulary_fields(tokenizer: "PreTrainedTokenizerBase", is_causal: bool) -> dict[str, int | None]:
    """Return the fields of a configuration that follow from the tokenizer."""
    return {"vocab_size": len(tokenizer), **special_ids(tokenizer, is_causal)}


# Files of this kind are dequantised on loading, so their weights may train.
MXFP4 = "mxfp4"


def saved_quantization(config: "PreTrainedConfig") -> str | None:
    """Return the storage format of a folder's weights: nf4, fp4, int8 (bitsandbytes), another method's name or None."""
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return None
    # bitsandbytes folders of older versions do not name their method.
    if (method := saved.get("quant_method", "bitsandbytes")) != "bitsandbytes":
        return method
    return "int8" if saved.get("load_in_8bit") else saved.get("bnb_4bit_quant_type", "fp4")


def is_double_quantized(config: "PreTrainedConfig") -> bool:
    """Return True if the scales of a folder's 4-bit codes are quantised too."""
    return bool((getattr(config, "quantization_config", None) or {}).get("bnb_4bit_use_double_quant"))


def check_saved_quantization(storage: str | None, pretrained: str, quantize: str | None, trains_adapter: bool) -> None:
    """Raise UserError unless a quantised folder keeps its quantisation and trains only an adapter."""
    if storage in (None, MXFP4):  # MXFP4 is dequantised on loading, then quantised if requested
        return
    if quantize not in (None, storage):
        raise UserError(f"model.quantize is {quantize}, but {pretrained} is saved in {storage}. Set model.quantize to "
                        f"{storage} or null.")
    if not trains_adapter:
        raise UserError(f"model.pretrained: {pretrained} is saved in {storage}, so it cannot be trained fully. Set "
                        "model.lora.")


# ---------------------------------------------------------------------------------------------------------------------
# Rotary positions in transformers' configurations: `rope_parameters`, and the older fields merged into it.

OLDER = ("rope_theta", "rope_scaling", "partial_rotary_factor")  # of transformers 4, still accepted by configurations
ROPE_FIELDS = ("rope_parameters", *OLDER)
KEPT = ("rope_theta", "partial_rotary_factor")  # belong to the trained model, not to a scaling method


def rope_with(config: "PreTrainedConfig", field: str, value: object) -> dict[str, Any]:
    """Return the `rope_parameters` of a configuration with one of `ROPE_FIELDS` set.

    If layer types have separate parameters, as in Gemma 3, a field without types sets `full_attention`, as transformers
    reads `rope_scaling` there. The fields of `KEPT` keep the model's values unless set.
    """
    parameters = config.rope_parameters or {}
    # One set of parameters for all layers.
    if not any(isinstance(part, dict) for part in parameters.values()):
        return _merge(parameters, field, value)
    parts = value if isinstance(value, dict) and value.keys() <= parameters.keys() else {"full_attention": value}
    return {**parameters, **{layer_type: _merge(parameters.get(layer_type) or {}, field, part)
                             for layer_type, part in parts.items()}}


def _merge(parameters: dict[str, Any], field: str, value: object) -> dict[str, Any]:
    if field in KEPT:
        return {**parameters, field: value}
    if not isinstance(value, dict):
        raise UserError(f"model.config_overrides.{field} is {value!r}, but must be a mapping, for example "
                        "{rope_type: yarn, factor: 4.0}.")
    renamed = {"rope_type" if name == "type" else name: part for name, part in value.items()}
    return {**{name: parameters[name] for name in KEPT if name in parameters}, **renamed}


def ropes_by_length(config: "PreTrainedConfig") -> set[str]:
    """Return the rope types of a configuration whose angles depend on the length of the row."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    return {values.get("rope_type", "default") for values in (parameters, *by_layer)} & {"dynamic", "longrope"}


def check_rope(config: "PreTrainedConfig") -> None:
    """Raise UserError unless transformers can compute the rotary positions of a configuration, if it has any."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Fill in `rope_type` and merge older fields, for the checks below.
    config.standardize_rope_params()
    parts = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    known = {"default", *ROPE_INIT_FUNCTIONS}
    if unknown := {part["rope_type"] for part in parts} - known:
        raise UserError(f"model.config: rope_parameters {parameters} cannot be used: {min(unknown)!r} is not a "
                        f"rope_type. Known: {', '.join(sorted(known))}.")
    try:
        config.validate_rope()
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"model.config: rope_parameters {parameters} cannot be used: {one_line(error)}.") from error
