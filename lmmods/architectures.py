"""What is known here of transformers' configurations, in both engines."""

from typing import Any

from lmmods.errors import UserError

# Fields of a configuration that the functions below read.
FIELDS = ("model_type", "max_position_embeddings", "pad_token_id", "type_vocab_size")
# In RoBERTa and its kin the first token's position is the one after the padding token's id.
COUNT_FROM_PADDING = ("roberta", "camembert", "data2vec-text", "mpnet", "longformer")


def position_limit(fields: dict[str, Any]) -> int | None:
    """Longest row that a configuration of these fields allows, where it says so."""
    positions = fields.get("max_position_embeddings", fields.get("n_positions"))
    if positions and any(kin in fields.get("model_type", "") for kin in COUNT_FROM_PADDING):
        return positions - (1 if fields.get("pad_token_id") is None else fields["pad_token_id"]) - 1
    return positions


def tells_token_types(fields: dict[str, Any]) -> bool:
    """Whether a network of this configuration tells kinds of token apart (`token_type_ids`), question from context say.

    DistilBERT and decoders do not, whatever their tokenizer offers; RoBERTa knows one kind alone.

    Args:
        fields: `model_type` and what is set; others have the type's default.
    """
    from transformers import CONFIG_MAPPING

    model_type = fields.get("model_type")
    if model_type not in CONFIG_MAPPING or model_type == "xlnet":  # code of its own; kinds without a table
        return True
    default = getattr(CONFIG_MAPPING[model_type](), "type_vocab_size", None)  # other types may hold a stray field
    return default is not None and fields.get("type_vocab_size", default) > 1


def special_ids(tokenizer: Any, is_causal: bool) -> dict[str, int | None]:
    """What a configuration says of the tokens that begin, end and pad a text.

    A token that pads a causal model beside another office is not named: torch never trains the row of the embedding
    that a configuration names as padding.
    """
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
    if is_causal and ids["pad_token_id"] in (ids["bos_token_id"], ids["eos_token_id"], tokenizer.unk_token_id):
        ids["pad_token_id"] = None
    return ids


def saved_quantization(config: Any) -> str | None:
    """How a folder keeps its weights: nf4, fp4 or int8 (bitsandbytes), the name of another method, or None.

    Args:
        config: The folder's configuration.
    """
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return None
    if (method := saved.get("quant_method", "bitsandbytes")) != "bitsandbytes":
        return method
    return "int8" if saved.get("load_in_8bit") else saved.get("bnb_4bit_quant_type", "fp4")


def check_saved_quantization(kind: str | None, pretrained: str, quantize: str | None, trains_adapter: bool) -> None:
    """A folder that is quantised already stays as it is, and trains only beside an adapter. UserError otherwise."""
    if kind is None:
        return
    if quantize not in (None, kind):
        raise UserError(f"model.quantize is {quantize}, but {pretrained} is saved in {kind}. Set model.quantize to "
                        f"{kind} or null.")
    if not trains_adapter:
        raise UserError(f"model.pretrained: {pretrained} is saved in {kind}, so it cannot be trained in full: set "
                        "model.lora.")
