"""generation_config.json of an exported causal model: defaults of transformers' `generate`.

Written here instead of by transformers' GenerationConfig, which needs torch.
"""

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from lmmods.core.settings import Generation

GENERATION_CONFIG = "generation_config.json"
SILENT = {field.name: field.default for field in fields(Generation)}
# transformers 5 no longer has these methods: it would download them from the hub, as code.
GONE = ("penalty_alpha", "num_beam_groups", "diversity_penalty")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAMS = ("early_stopping", "length_penalty")
BOOKKEEPING = ("_from_model_config", "transformers_version")


def saved_end_ids(folder: Path) -> list[int]:
    """Return the tokens that end an answer, from the file in a model folder; [] without it."""
    path = folder / GENERATION_CONFIG
    return _end_ids(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def _end_ids(content: dict[str, Any]) -> list[int]:
    ends = content.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def exported_generation(settings: Generation, base: dict[str, Any], stop_token_ids: list[int], bos: int | None,
                        pad: int | None) -> dict[str, Any]:
    """Return the content of generation_config.json.

    Values that differ from the defaults of `settings` override the base's. Options that the decoding method does
    not use are omitted, since transformers warns of them.

    Args:
        base: Content of the file of the model that the run started from.
        stop_token_ids: Tokens that end an answer, in addition to the base's.
        bos: Id of the start token, if there is one.
        pad: Id of the padding token.
    """
    ends = _end_ids(base)
    explicit = {name: value for name, default in SILENT.items() if (value := getattr(settings, name)) != default}
    if {"num_beams", "penalty_alpha"} & explicit.keys():  # these methods do not sample, even if the base does
        explicit = {"do_sample": False, **explicit}
    if not {"max_new_tokens", "max_length"} & base.keys():
        explicit["max_new_tokens"] = settings.max_new_tokens  # transformers' own default is 20 tokens with the prompt
    content = {**base, **explicit, "eos_token_id": list(dict.fromkeys([*stop_token_ids, *ends]))}
    content |= {name: token for name, token in (("bos_token_id", bos), ("pad_token_id", pad)) if token is not None}
    omitted = [*GONE, *BOOKKEEPING, *(() if content.get("do_sample") else SAMPLING),
               *(() if (content.get("num_beams") or 1) > 1 else BEAMS),
               *(["max_length"] if "max_new_tokens" in explicit else [])]
    return {name: value for name, value in sorted(content.items()) if name not in omitted}


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers of sampled text: one per seed, row and token, so that both engines sample the same text.

UNIT = 2**-30  # of probability; sums stay below 2^31 for any vocabulary


def sampling_uniforms(seed: int, rows: Iterable[int], count: int, answers: int = 1, step: int | None = None
                      ) -> np.ndarray:
    """Return uniform numbers in [0, 1), [rows * answers, count] float32; an answer's numbers do not depend on others.

    Each answer to a row has its own stream of Philox4x64 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1,
    2, 3"), with seed and row as its key and the step and the answer's index as the highest words of its counter. The
    sampled token is the first at which the cumulative probability, in the order of the vocabulary, exceeds the uniform
    number. Probabilities are summed as multiples of `UNIT`: a parallel sum of floats can also grow at tokens of
    probability zero, which would then be sampled occasionally.

    Args:
        rows: Indices of rows, -1 (padding) or more.
        count: Maximum number of tokens in an answer.
        answers: Number of answers per row, which are neighbours in the result.
        step: Number of steps trained before sampling, or the epoch if each row is answered once per epoch; None for
            numbers that do not change in training.
    """
    step_word = 0 if step is None else step + 1
    streams = (np.random.Generator(np.random.Philox(key=[seed, row + 1], counter=[0, 0, step_word, answer]))
               for row in rows for answer in range(answers))
    return np.array([stream.random(count, np.float32) for stream in streams], np.float32).reshape(-1, count)
