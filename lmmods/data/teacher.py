"""Checks of a teacher that a network learns from."""

import os
from typing import Any

from lmmods.core.errors import UserError
from lmmods.core.hf_config import load_config
from lmmods.core.settings import Teacher
from lmmods.data.encode.tokenizer import TokenizerOptions

SHOWN = 3  # tokens named in a message


def check_teacher(teacher: Teacher, tokenizer: Any, trust_remote_code: bool = False) -> None:
    """Raise UserError unless a teacher has the vocabulary of the data, whose ids its distributions are over.

    Its padding token may be another, and its network may have more rows than there are tokens: these are left out.

    Args:
        tokenizer: Of the data.
    """
    has_own = teacher.adapter is not None and os.path.isfile(os.path.join(teacher.adapter, "tokenizer_config.json"))
    path = teacher.adapter if has_own else teacher.pretrained
    theirs = TokenizerOptions(path, trust_remote_code=trust_remote_code).loaded
    ours, known = tokenizer.get_vocab(), theirs.tokenizer.get_vocab()
    # A padding token that only one of them has is never predicted.
    padding = {tokenizer.pad_token, *theirs.tokenizer.convert_ids_to_tokens(theirs.new_tokens)}
    differing = [token for token in sorted({**ours, **known}, key=lambda token: ours.get(token, known.get(token)))
                 if ours.get(token) != known.get(token) and token not in padding]
    if differing:
        named = ", ".join(f"{token!r} ({_place(ours, token)} here, {_place(known, token)} there)"
                          for token in differing[:SHOWN])
        raise UserError(f"model.teacher.pretrained is {teacher.pretrained}, whose vocabulary ({path}) is not that of "
                        f"data.tokenizer: {len(differing)} tokens differ, such as {named}. Distributions are compared "
                        "token by token, so take a teacher with the same tokenizer.")
    rows = load_config(teacher.pretrained, None, None, trust_remote_code).get_text_config().vocab_size
    if not has_own and rows < max(known.values()) + 1 - len(theirs.new_tokens):
        raise UserError(f"model.teacher.pretrained is {teacher.pretrained}, whose network knows {rows} tokens, but its "
                        f"tokenizer has {len(known)}. Name a model that was trained with this tokenizer.")


def _place(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "unknown"
