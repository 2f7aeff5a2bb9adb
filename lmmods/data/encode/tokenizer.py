"""Loads a fast tokenizer and adds what small or old repositories lack."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, normalizers

from lmmods.core import hub
from lmmods.core.errors import UserError
from lmmods.core.redaction import redact
from lmmods.data.encode.chat_template import ChatTemplate
from lmmods.data.read.conversation import RowProblem

# Known names of each role, looked up in the vocabulary in this order.
KNOWN_NAMES = {
    "bos_token": ["<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>"],
    "eos_token": ["</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "<|im_end|>"],
    "unk_token": ["<unk>", "[UNK]"],
    "pad_token": ["[PAD]", "<pad>", "<|padding|>"],
    "cls_token": ["[CLS]"],
    "sep_token": ["[SEP]"],
    "mask_token": ["[MASK]", "<mask>"],
}
AROUND_TEXT = ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token")  # roles of tokens that are no text
TAG = re.compile(r"<(/?)([^<>/|\s]+)>")
PROBE = "\U0010fffd"  # content of a turn

# For each of `data.tokenizer_options`: its name in tokenizers' BertNormalizer, a character, and the result of
# normalising that if the option is true.
EFFECTS = {"do_lower_case": ("lowercase", "A", "a"), "strip_accents": ("strip_accents", "é", "e"),
           "tokenize_chinese_chars": ("handle_chinese_chars", "中", " 中 ")}


@dataclass
class RepairedTokenizer:
    """A tokenizer with padding and end tokens.

    Args:
        tokenizer: transformers fast tokenizer.
        new_tokens: Ids missing from the vocabulary on disk.
        trainable_new_tokens: Those of them with a meaning (all but an added padding token).
        notes: Descriptions of the repairs, for the report.
    """

    tokenizer: Any
    new_tokens: list[int] = field(default_factory=list)
    trainable_new_tokens: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class TokenizerOptions:
    """Choice of a tokenizer and changes to it, as in DataFields and TaskFields.

    Args:
        pad_token: Padding token, existing or new; None keeps the tokenizer's, or finds one.
        add_tokens: Tokens that must not be split. Those in the chat template become special: text never yields them,
            unless they are content tags.
        options: Options of the tokenizer's class.
        new_padding: Add [PAD] if no padding token is found; otherwise another token pads.
        whole_words: False makes all of `add_tokens` special, so that they are recognised in templates only.
        chat_template: Jinja template that replaces the tokenizer's own chat template.
        template: Text of another template that is used instead of the chat template; None if no template is used.
    """

    path: str | None
    revision: str | None = None
    trust_remote_code: bool = False
    pad_token: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    add_tokens: list[str] | None = None
    options: dict[str, bool] | None = None
    new_padding: bool = True
    whole_words: bool = True
    chat_template: str | None = None
    template: str | None = None

    @cached_property
    def loaded(self) -> RepairedTokenizer:
        """The tokenizer, loaded at first use. Raises UserError."""
        return load_tokenizer(self)


def load_tokenizer(options: TokenizerOptions) -> RepairedTokenizer:
    """Load the fast tokenizer of a folder or hub id and repair it.

    Raises:
        UserError: There is no tokenizer, only a slow one, or one that does not support the options.
    """
    from transformers import AutoTokenizer

    path = options.path
    if path is None:
        raise UserError("no tokenizer is set; set data.tokenizer, or model.pretrained to a folder that has one")
    if os.path.isdir(path) and not any("token" in name or name.startswith("vocab") for name in os.listdir(path)):
        raise UserError(f"{path}: this folder has no tokenizer (no tokenizer.json, tokenizer.model or vocabulary). "
                        "Set data.tokenizer to a folder or hub id that has one")
    try:
        with hub.loading("tokenizer", path, revision=options.revision, missing=(OSError, ValueError)):
            tokenizer = AutoTokenizer.from_pretrained(path, revision=options.revision,
                                                      trust_remote_code=options.trust_remote_code,
                                                      **(options.options or {}))
    except UserError:
        raise
    except Exception as error:  # transformers raises many types, all about this path
        raise UserError(f"{path}: no tokenizer can be loaded from here ({type(error).__name__}: "
                        f"{redact(str(error))[:300]}). Set data.tokenizer to a folder or hub id that has one"
                        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{path}: there is only a slow tokenizer. Add a tokenizer.json")
    _set_options(tokenizer, options)
    if options.chat_template is not None:
        tokenizer.chat_template = options.chat_template
    role_tokens = {role: getattr(options, role) for role in ("pad_token", "bos_token", "eos_token")}
    role_tokens = {role: name for role, name in role_tokens.items() if name is not None}
    result = repair(tokenizer, role_tokens, options.new_padding)
    _add_tokens(result, options)
    return result


def _set_options(tokenizer, options: TokenizerOptions) -> None:  # noqa: ANN001
    """Set options in the normalizer of tokenizer.json, where transformers ignores them unless the class is BERT's.

    Raises:
        UserError: The tokenizer does not read text as an option says.
    """
    normalizer = tokenizer.backend_tokenizer.normalizer
    for name, value in (options.options or {}).items():
        attribute, character, changed = EFFECTS[name]
        if isinstance(normalizer, normalizers.BertNormalizer):
            setattr(normalizer, attribute, value)
        # Judge by the effect: options that a class ignores must not pass silently.
        read = normalizer.normalize_str(character) if normalizer else character
        if (read == changed) is not value:
            raise UserError(f"data.tokenizer_options.{name} is {str(value).lower()}, but the tokenizer of "
                            f"{options.path} ({type(tokenizer).__name__}) still reads {character!r} as "
                            f"{read!r}. It applies only to BERT-style tokenizers. Remove it")


def _add_tokens(result: RepairedTokenizer, options: TokenizerOptions) -> None:
    """Add `add_tokens` as unsplit tokens; those in the vocabulary keep their ids."""
    tokenizer, size = result.tokenizer, len(result.tokenizer)
    template_text = None if options.template is None else f"{options.template}{tokenizer.chat_template}"
    vocabulary = tokenizer.get_vocab()
    tokens_by_name = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
    protected = _roles(tokenizer)
    for name in options.add_tokens or []:
        # Tokens of the template are special, so that users cannot type them; others must be found in text.
        is_special = not options.whole_words or name in protected or template_text is not None and name in template_text
        if name in tokens_by_name and options.whole_words:
            if is_special or not tokens_by_name[name].special:
                result.notes.append(f"data.add_tokens: {name} is already a token")
                continue
            result.notes.append(f"data.add_tokens: {name} was a special token and is now matched in text")
        if name in vocabulary and name not in tokens_by_name:
            result.notes.append(f"data.add_tokens: {name} keeps its id {vocabulary[name]} and is no longer split")
        # Not normalised: matched in the text as written, before lower-casing and the like.
        tokenizer.add_tokens([AddedToken(name, special=is_special, normalized=False)], special_tokens=is_special)
    # New tokens get the ids after the old ones.
    added = list(range(size, len(tokenizer)))
    result.new_tokens += added
    result.trainable_new_tokens += added


def decode(tokenizer, ids: Sequence[int], ends: Sequence[int] = (), **options: Any) -> str:  # noqa: ANN001
    """Return the text of ids without the begin, end and padding tokens around it.

    All other special tokens are part of the text: rewards, predictions and their references must see the same.

    Args:
        ids: A list, or an array or tensor [T].
        ends: Further tokens that end an answer, such as the end of a turn.
        options: For transformers' `decode`.
    """
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    around = {getattr(tokenizer, f"{role}_id") for role in AROUND_TEXT} | set(ends)
    inside = [index for index, token in enumerate(ids) if token not in around]
    text: str = tokenizer.decode(ids[inside[0] : inside[-1] + 1] if inside else [], **options)
    return text


def content_tags(tokenizer) -> list[str]:  # noqa: ANN001
    """Return the special tokens that texts may contain, such as <think> and </think>.

    They are tags in pairs, <name> and </name>, that have no role such as the end token, and do not mark turns.
    """
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} - _roles(tokenizer)
    tags = {name: match[2] for name in special if (match := TAG.fullmatch(name))
            and f"<{'' if match[1] else '/'}{match[2]}>" in special}
    marks = _turn_marks(tokenizer) if tags and tokenizer.chat_template else ()
    return sorted(name for name, tag_name in tags.items() if tag_name not in marks)


def _turn_marks(tokenizer) -> set[str]:  # noqa: ANN001
    """Return the names of tags that the chat template opens and closes around a turn's content.

    If the template rejects the probe turns, return all of its tags.
    """
    turns = [{"role": role, "content": PROBE} for role in ("user", "assistant", "user")]
    try:
        template = ChatTemplate(tokenizer.get_chat_template(), tokenizer.special_tokens_map)
        parts = template.render(turns, False).split(PROBE)
    except (RowProblem, UserError):
        return {name for _, name in TAG.findall(str(tokenizer.chat_template))}
    return {name for part in parts for _, name in TAG.findall(part)
            if part.count(f"<{name}>") != part.count(f"</{name}>")}


def _roles(tokenizer) -> set[str]:  # noqa: ANN001
    """Return the names of the tokens that have a role, such as the end token."""
    return {name for role in KNOWN_NAMES if (name := getattr(tokenizer, role)) is not None}


def encoding_state(tokenizer) -> dict[str, Any]:  # noqa: ANN001
    """Return all of a transformers tokenizer that token ids could depend on."""
    return {"tokenizer": tokenizer.backend_tokenizer.to_str(), "chat_template": tokenizer.chat_template,
            "special": tokenizer.special_tokens_map}


def distinguishes_texts(tokenizer) -> bool:  # noqa: ANN001
    """Return whether a tokenizer gives the two texts of a pair different token types."""
    if "token_type_ids" in tokenizer.model_input_names or "model_input_names" in tokenizer.init_kwargs:
        return "token_type_ids" in tokenizer.model_input_names
    return 1 in tokenizer.backend_tokenizer.encode("a", "b").type_ids and tokenizer.cls_token is not None


def repair(tokenizer, roles: dict[str, str], new_padding: bool = True) -> RepairedTokenizer:  # noqa: ANN001
    """Assign missing roles to tokens of the vocabulary, and ensure that there is a padding token.

    Args:
        tokenizer: transformers tokenizer, changed in place.
        roles: Roles that the user assigns, for example {"pad_token": "<unk>"}.
        new_padding: Add [PAD] if no padding token is found; otherwise another token pads.
    """
    result = RepairedTokenizer(tokenizer)
    size, vocabulary = len(tokenizer), tokenizer.get_vocab()
    # The user's choices first, so that known names fill only what is left.
    tokenizer.add_special_tokens(dict(roles))
    for role, names in KNOWN_NAMES.items():
        known_name = next((name for name in names if name in vocabulary), None)
        if getattr(tokenizer, role) is None and known_name is not None:
            tokenizer.add_special_tokens({role: known_name})
            result.notes.append(f"{role} was missing: set to {known_name}")
    if tokenizer.pad_token is None:
        shared = None if new_padding else _find_padding(tokenizer)
        tokenizer.add_special_tokens({"pad_token": shared or "[PAD]"})
        if shared:
            result.notes.append(f"pad_token was missing: {shared} pads, masked out and never a target")
    # Only ids beyond the old vocabulary need new rows in the model.
    padding_is_new = tokenizer.pad_token_id >= size
    if padding_is_new:
        result.notes.append(f"pad_token {tokenizer.pad_token} is new: the vocabulary grows from {size} to {size + 1}")
    result.new_tokens = list(range(size, len(tokenizer)))
    # Padding is neither a target nor attended to, so its embedding has nothing to learn.
    padding = tokenizer.pad_token_id if padding_is_new else None
    result.trainable_new_tokens = [token for token in result.new_tokens if token != padding]
    return result


def _find_padding(tokenizer) -> str | None:  # noqa: ANN001
    """Return an existing token for padding, where its other meaning does no harm: the unknown token, else the end
    token.

    The unknown token is preferred: other programs never train on the padding token, and a model must learn to end.
    """
    ends = (tokenizer.eos_token, tokenizer.bos_token)
    return tokenizer.unk_token if tokenizer.unk_token not in (None, *ends) else ends[0] or ends[1]
