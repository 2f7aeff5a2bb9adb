"""How adapters start, in both engines: from the seed and the names of their weights alone."""

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
    return np.random.default_rng([seed, zlib.crc32(name.encode())]).uniform(-bound, bound, shape).astype(np.float32)
