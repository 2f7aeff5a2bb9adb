"""Deterministic initialisation of parameters that no file holds, the same in both engines.

Each value depends on the seed and the parameter's name alone: not on the engine, the device, or the order of creation.
"""

import math
import zlib

import numpy as np


def init_lora_A(seed: int, name: str, shape: tuple[int, int]) -> np.ndarray:  # noqa: N802 - PEFT's name
    """Initial A of a LoRA adapter, float32 [rank, inputs]: PEFT's distribution, uniform in +-1/sqrt(inputs).

    Args:
        name: The parameter's name in a PEFT model, `base_model.model....lora_A.default.weight`.
    """
    bound = 1 / math.sqrt(shape[-1])
    return _generator(seed, name).uniform(-bound, bound, shape).astype(np.float32)


def init_weight(seed: int, name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    """Initial parameter of a head that the checkpoint lacks, float32: a matrix is normal, a bias zero.

    Args:
        name: The parameter's name in transformers, for example `qa_outputs.weight`.
        std: Standard deviation: `initializer_range` of the configuration.
    """
    if len(shape) < 2:
        return np.zeros(shape, np.float32)
    return (_generator(seed, name).standard_normal(shape) * std).astype(np.float32)


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
