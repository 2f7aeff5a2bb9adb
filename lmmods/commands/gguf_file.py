"""Convert a transformers model folder to a GGUF file, for llama.cpp and programs based on it.

Names of tensors and keys come from the package `gguf`. What a reader computes for an architecture, and how it tokenises
text, comes from llama.cpp (src/models, src/llama-vocab.cpp). Models that llama.cpp would compute differently from
transformers are rejected.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.generation_config import GENERATION_CONFIG, saved_end_ids
from lmmods.core.image_models import is_of_language_model

GGUFType = Literal["f32", "f16", "bf16", "q8_0"]
BLOCK = 32  # number of weights that share a scale in q8_0


def _no_condition(config: Any) -> str | None:
    return None


def _rope_in_three_of_four_layers(config: Any) -> str | None:
    expected = [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]
    return None if list(config.no_rope_layers) == expected else "no_rope_layers other than every fourth"


def _gemma_attention(period: int, num_layers_of_largest: int) -> Callable[[Any], str | None]:
    """Return the check of a Gemma model in which every `period`-th layer has full attention.

    Args:
        num_layers_of_largest: Number of layers of the model whose attention scale depends on the hidden size.
    """
    def check(config: Any) -> str | None:
        layer_types = ["sliding_attention" if (layer + 1) % period else "full_attention"
                       for layer in range(config.num_hidden_layers)]
        if list(config.layer_types) != layer_types:
            return f"layer_types other than full attention in every layer of number {period}"
        is_largest = config.num_hidden_layers == num_layers_of_largest
        scale = config.hidden_size // config.num_attention_heads if is_largest else config.head_dim
        return None if config.query_pre_attn_scalar == scale else f"query_pre_attn_scalar other than {scale}"

    return check


@dataclass(frozen=True)
class Family:
    """How an architecture is stored, and what llama.cpp supports of it.

    Args:
        name: llama.cpp's name of the architecture.
        activation: Activation of the feed-forward network.
        interleaved: True if query and key rows are stored so that rotary pairs are adjacent.
        all_biases: True if every matrix may have a bias, False if only queries, keys and values may.
        one_plus: True if norms scale by 1 + weight; the file stores this sum.
        llama3_rope: True if RoPE frequencies may have individual divisors.
        has_window: True if the reader supports sliding windows.
        unsupported: Returns what the reader would compute differently, or None.
    """

    name: str
    activation: str = "silu"
    interleaved: bool = False
    all_biases: bool = False
    one_plus: bool = False
    llama3_rope: bool = False
    has_window: bool = False
    unsupported: Callable[[Any], str | None] = _no_condition


LLAMA = Family("llama", interleaved=True, all_biases=True, llama3_rope=True)
GELU = "gelu_pytorch_tanh"
FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": Family("qwen2"),
    "Qwen3ForCausalLM": Family("qwen3"),
    "SmolLM3ForCausalLM": Family("smollm3", interleaved=True, unsupported=_rope_in_three_of_four_layers),
    "GemmaForCausalLM": Family("gemma", GELU, one_plus=True),
    "Gemma2ForCausalLM": Family("gemma2", GELU, one_plus=True, has_window=True, unsupported=_gemma_attention(2, 46)),
    "Gemma3ForCausalLM": Family("gemma3", GELU, one_plus=True, has_window=True, unsupported=_gemma_attention(6, 62)),
}


def require_gguf() -> None:
    """Raise UserError if the package `gguf` is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"--gguf needs the package gguf ({error}). Install it: pip install -e '.[gguf]'") from error


def find_family(config: Any) -> Family:
    """Return the family of a configuration's language model. Raises UserError: it is not supported."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get_text_config().model_type
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, model_type)
    if architecture not in FAMILIES:
        raise UserError(f"--gguf: {architecture} is not one of {', '.join(FAMILIES)}. {CONVERTER}")
    return FAMILIES[architecture]


CONVERTER = ("Remove --gguf, and convert merge's output folder with llama.cpp's "
             "`python convert_hf_to_gguf.py FOLDER --outfile model.gguf`.")


def write_gguf(folder: Path, path: Path, dtype: GGUFType, name: str) -> None:
    """Write the language model of a folder as a GGUF file, with one tensor in memory at a time.

    Args:
        folder: Weights, configuration and tokenizer, as transformers saves them.
        dtype: Type of the matrices; vectors are float32. In q8_0, rows that are not a multiple of 32 are f16.
        name: Name of the model in the file.

    Raises:
        UserError: A reader of the file would compute or tokenise differently, or a weight is too large for f16.
    """
    from transformers import AutoConfig, AutoTokenizer

    if not (folder / "tokenizer.json").is_file():
        raise build_error("tokenizer, which is not saved as tokenizer.json")
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    family, text_config = find_family(config), config.get_text_config()
    writer = open_writer(path, family.name, dtype, name)
    try:
        _add_sizes(writer, family, text_config)
        _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), tokenizer,
                       text_config.vocab_size)
        _add_end_tokens(writer, folder, tokenizer)
        tensors = list(_list_tensors(folder, family, config, dtype))
    except Unsupported as error:
        raise build_error(error) from error
    write_file(writer, tensors)


def open_writer(path: Path, architecture: str, dtype: GGUFType, name: str) -> Any:
    """Return gguf's writer of a file, with the keys that all files have."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    file_types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(getattr(gguf.LlamaFileType, file_types[dtype]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return writer


def write_file(writer: Any, tensors: "list[StoredTensor]") -> None:
    """Write keys and tensors, and close the file. Raises UserError: a weight is too large for f16."""
    import gguf

    for stored in tensors:
        in_bytes = gguf.quant_shape_to_byte_shape(stored.shape, stored.kind)
        writer.add_tensor_info(stored.name, in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes)), stored.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for stored in tensors:
        writer.write_tensor_data(gguf.quants.quantize(stored.read(), stored.kind))
    writer.close()


def build_error(feature: object) -> UserError:
    """Return the error for a feature of a model that llama.cpp does not support."""
    return UserError(f"--gguf: llama.cpp does not support this model's {feature}. {CONVERTER}")


class Unsupported(Exception):
    """Feature of a model that readers of the file do not support."""


# ---------------------------------------------------------------------------------------------------------------------
# Sizes and constants


def _add_sizes(writer: Any, family: Family, config: Any) -> None:
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation != family.activation:
        raise Unsupported(f"activation {activation}")
    if reason := family.unsupported(config):
        raise Unsupported(reason)
    head_dim = _head_dim(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(_context_length(family, config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(head_dim)
    if family.has_window:
        writer.add_sliding_window(config.sliding_window)
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := getattr(config, key, None)) is not None:
                if family.name == "gemma3" and key == "attn_logit_softcapping":
                    raise Unsupported(key)
                getattr(writer, f"add_{key}")(cap)
            elif family.name == "gemma2":
                raise Unsupported(f"missing {key}")
    _add_rope(writer, family, config)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _context_length(family: Family, config: Any) -> int:
    """Return the context length. A window that the reader does not support limits it, so that results stay equal."""
    window = None if family.has_window else getattr(config, "sliding_window", None)
    return min(config.max_position_embeddings, window or config.max_position_embeddings)


def _add_rope(writer: Any, family: Family, config: Any) -> None:
    import gguf

    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    rope_type = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("partial_rotary_factor")
    if rope_type not in ("default", "linear", *(["llama3"] if family.llama3_rope else [])):
        raise Unsupported(f"rope_type {rope_type}")
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope_type == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if local := ropes.get("sliding_attention"):
        if local.get("rope_type", "default") != "default":
            raise Unsupported("scaled rope of sliding layers")
        writer.add_rope_freq_base_swa(local["rope_theta"])


def _rope_divisors(config: Any) -> Any:
    """Return the divisors of the RoPE frequencies in Llama 3's scaling, float32 [head_dim / 2]."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, _head_dim(config), 2).double()
                                                      / _head_dim(config))
    return (plain / scaled.double()).float().numpy()


# ---------------------------------------------------------------------------------------------------------------------
# Weights


@dataclass
class StoredTensor:
    """A tensor of a file.

    Args:
        kind: gguf's type.
        read: Returns the values, float32.
    """

    name: str
    shape: tuple[int, ...]
    kind: Any
    read: Callable[[], Any]


def list_weights(folder: Path, dtype: GGUFType) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Any]]]:
    """Yield name, shape and a function that reads the values (torch, float32) of each weight of a model folder.

    The function raises UserError if the values are too large for the type.
    """
    from safetensors import safe_open

    def read(file: Path, name: str) -> Any:
        with safe_open(file, "pt") as weights:
            tensor = weights.get_tensor(name).float()
        if dtype in ("f16", "q8_0") and tensor.ndim > 1 and tensor.abs().max() > 65504:
            raise UserError(f"--gguf {dtype}: {name} has weights above 65504, the maximum of float16. Use bf16 or f32.")
        return tensor

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in sorted(weights.keys())}
        for name, shape in shapes.items():
            yield name, shape, partial(read, file, name)


def _list_tensors(folder: Path, family: Family, config: Any, dtype: GGUFType) -> Iterator[StoredTensor]:
    import gguf

    text = config.get_text_config()
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.name)
    names = gguf.get_tensor_name_map(arch, text.num_hidden_layers)
    if text.rope_parameters.get("rope_type") == "llama3":
        divisors = _rope_divisors(text)
        yield StoredTensor("rope_freqs.weight", divisors.shape, gguf.GGMLQuantizationType.F32, lambda: divisors)
    for full_name, shape, read in list_weights(folder, dtype):
        source = full_name
        if text is not config:  # a model that also reads images
            if not is_of_language_model(full_name):
                continue
            source = re.sub(r".*(language_model|text_model)\.(model\.)?", "model.", full_name)
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(source, (".weight", ".bias"))
        if target is None or target.endswith(".bias") and not _has_bias(family, target):
            raise Unsupported(f"weight {full_name}")
        yield StoredTensor(target, shape, find_type(dtype, shape), _reader(read, source, family, text))


def _has_bias(family: Family, target: str) -> bool:
    return family.all_biases or target.split(".")[-2] in ("attn_q", "attn_k", "attn_v")


def find_type(dtype: GGUFType, shape: tuple[int, ...]) -> Any:
    """Return gguf's type of a tensor."""
    from gguf import GGMLQuantizationType

    if len(shape) == 1:
        return GGMLQuantizationType.F32
    return GGMLQuantizationType["F16" if dtype == "q8_0" and shape[-1] % BLOCK else dtype.upper()]


def _reader(read_weight: Callable[[], Any], source: str, family: Family, config: Any) -> Callable[[], Any]:
    """Return a function that reads a tensor in the form that the file stores."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def read() -> Any:
        tensor = read_weight()
        if family.one_plus and source.endswith("norm.weight"):
            tensor = tensor + 1
        count = heads.get(source.split(".")[-2])
        if family.interleaved and count is not None:
            # Rows of each head: (halves, pairs) -> (pairs, halves).
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        return tensor.contiguous().numpy()

    return read


# ---------------------------------------------------------------------------------------------------------------------
# Tokens
#
# llama.cpp supports two methods: byte-level BPE by the rank of merges, with a named regular expression that splits text
# into words; and SentencePiece, which merges the neighbours whose union has the highest score.

LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Name in llama.cpp -> regular expression, and whether words in the vocabulary are not merged.
WORDS = {
    "llama-bpe": (LETTERS + r"\p{N}{1,3}" + OTHERS, True),
    "smaug-bpe": (LETTERS + r"\p{N}{1,3}" + OTHERS, False),
    "qwen2": (LETTERS + r"\p{N}" + OTHERS, False),
}
SPACE = "\u2581"  # SentencePiece's space


def _add_tokenizer(writer: Any, saved: dict[str, Any], tokenizer: Any, vocab_size: int) -> None:
    """Add vocabulary, merges, special tokens and chat template.

    Args:
        saved: Content of tokenizer.json.
        vocab_size: Number of embedding rows.
    """
    from gguf import TokenType

    model = saved["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise Unsupported(f"tokenizer ({model['type']})")
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    has_byte_fallback = bool(model.get("byte_fallback"))
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, TokenType.NORMAL
        if has_byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[index] = TokenType.BYTE
    for added in saved["added_tokens"]:
        if added["lstrip"] or added["rstrip"] or added["single_word"]:
            raise Unsupported(f"token {added['content']}, which absorbs spaces or matches only whole words")
        index, text = added["id"], added["content"]
        # Added tokens are matched in the text before spaces are escaped.
        tokens[index] = text if added["special"] or not has_byte_fallback else text.replace(SPACE, " ")
        types[index] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        if has_byte_fallback and text == model.get("unk_token"):
            types[index] = TokenType.UNKNOWN
    merges = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"]]
    if has_byte_fallback:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_token_scores(tokens, types, model["vocab"], merges))
        writer.add_add_space_prefix(_has_space_prefix(saved))
    else:
        from tokenizers.pre_tokenizers import ByteLevel

        if not model["vocab"].keys() >= set(ByteLevel.alphabet()):
            raise Unsupported("tokenizer: it has no token for some bytes")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_word_rule_name(saved))
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for role in ("bos", "unk", "pad"):
        if (index := getattr(tokenizer, f"{role}_token_id")) is not None:
            getattr(writer, f"add_{role}_token_id")(index)
    token_ids, ids_with_special = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    starts_with_bos = ids_with_special == [tokenizer.bos_token_id, *token_ids]
    ends_with_eos = ids_with_special == [*token_ids, tokenizer.eos_token_id]
    has_both = ids_with_special == [tokenizer.bos_token_id, *token_ids, tokenizer.eos_token_id]
    if not (starts_with_bos or ends_with_eos or has_both or ids_with_special == token_ids):
        raise Unsupported("tokens around a text")
    writer.add_add_bos_token(starts_with_bos or has_both)
    writer.add_add_eos_token(ends_with_eos or has_both)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.get_chat_template())


def _word_rule_name(saved: dict[str, Any]) -> str:
    """Return llama.cpp's name of the rule by which a byte-level tokenizer splits text into words."""
    step = saved["pre_tokenizer"] or {}
    first, last = (step["pretokenizers"] if step.get("type") == "Sequence" and len(step["pretokenizers"]) == 2
                   else [None, step])
    # The normaliser NFC does not change text in Unicode's form NFC, which nearly all text has.
    if (saved["normalizer"] or {"type": "NFC"})["type"] != "NFC" or last.get("type") != "ByteLevel" or (
            last["add_prefix_space"]):
        raise Unsupported("tokenizer: its normalizer or pre_tokenizer")
    whole_words, by_regex = bool(saved["model"].get("ignore_merges")), last.get("use_regex", True)
    if by_regex and not whole_words:
        if first is None:
            return "gpt-2"
        if first == {"type": "Digits", "individual_digits": True}:
            return "smollm"
    if not by_regex and first is not None and first["type"] == "Split":
        rule = first["pattern"].get("Regex"), whole_words
        for name, known_rule in WORDS.items():
            if rule == known_rule and first["behavior"] == "Isolated" and not first["invert"]:
                return name
    raise Unsupported("tokenizer: its pre_tokenizer")


def _has_space_prefix(saved: dict[str, Any]) -> bool:
    """True if a SentencePiece-like tokenizer adds a space before text, and after special tokens."""
    normalizer, step = saved["normalizer"] or {}, saved["pre_tokenizer"]
    steps = normalizer.get("normalizers", [normalizer])
    prepends = {"type": "Prepend", "prepend": SPACE} in steps
    if step is not None and step["type"] == "Metaspace" and not normalizer:
        if step.get("split") is False and step["prepend_scheme"] in ("always", "never"):
            return step["prepend_scheme"] == "always"
    elif step is None or step["type"] == "Split" and step["pattern"] == {"String": " "}:  # no spaces are left to split
        escape = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        if [entry for entry in steps if entry.get("type") != "Prepend"] == [escape] and len(steps) == 1 + prepends:
            return prepends
    raise Unsupported("tokenizer: its normalizer or pre_tokenizer")


def _token_scores(tokens: list[str], types: list[Any], vocabulary: dict[str, int], merges: list[tuple[str, str]]
                  ) -> list[float]:
    """Return float32 scores of all tokens, with which SentencePiece merges as the list of merges does.

    A token's score is the negative index of its merges in the list. Both methods agree if all merges of a token are
    consecutive, and if every pair of tokens whose union is a token has a merge.
    """
    from gguf import TokenType

    groups = [token for token, _ in groupby(left + right for left, right in merges)]
    merge_set = set(merges)
    normal_tokens = {tokens[index] for index, token_type in enumerate(types) if token_type == TokenType.NORMAL}
    has_all_merges = all((token[:end], token[end:]) in merge_set
                         for token in normal_tokens for end in range(1, len(token))
                         if token[:end] in vocabulary and token[end:] in vocabulary)
    byte_tokens = sum(token_type == TokenType.BYTE for token_type in types)
    if len(groups) != len(set(groups)) or not has_all_merges or byte_tokens != 256:
        raise Unsupported("tokenizer: its merges cannot be expressed as token scores")
    scores = {token: float(-rank) for rank, token in enumerate(groups)}
    return [scores.get(token, float(-len(groups))) for token in tokens]


def _add_end_tokens(writer: Any, folder: Path, tokenizer: Any) -> None:
    """Add the tokens that end an answer: the tokenizer's, then others in the generation configuration."""
    ends = saved_end_ids(folder) or [tokenizer.eos_token_id]
    ends = sorted(dict.fromkeys(ends), key=lambda index: index != tokenizer.eos_token_id)
    keys = ("eos", "eot", "eom")
    if len(ends) > len(keys):
        raise Unsupported(f"{len(ends)} tokens that end an answer (eos_token_id in {GENERATION_CONFIG})")
    for key, index in zip(keys, ends):
        getattr(writer, f"add_{key}_token_id")(index)
