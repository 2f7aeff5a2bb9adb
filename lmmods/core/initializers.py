"""How weights start that no file holds, in both engines: from the seed and their names alone."""

import math
import zlib

import numpy as np


def fresh_lora_A(seed: int, name: str, shape: tuple[int, int]) -> np.ndarray:  # noqa: N802 - PEFT's name
    """The first A of a low-rank update, float32 [rank, inputs]: PEFT's distribution, uniform in +-1/sqrt(inputs).

    Args:
        seed: Of the run.
        name: Of the parameter as PEFT has it in memory, `base_model.model....lora_A.default.weight`.
    """
    bound = 1 / math.sqrt(shape[-1])
    return _generator(seed, name).uniform(-bound, bound, shape).astype(np.float32)


def fresh_weight(seed: int, name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    """A weight of a head that the checkpoint lacks, float32: normal with this standard deviation; a bias is zero.

    Args:
        seed: Of the run.
        name: Of the parameter in transformers, for example `qa_outputs.weight`.
        std: `initializer_range` of the configuration.
    """
    if len(shape) < 2:
        return np.zeros(shape, np.float32)
    return (_generator(seed, name).standard_normal(shape) * std).astype(np.float32)


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
