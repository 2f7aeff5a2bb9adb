"""The chance in sampled text: a number for each seed, row and token, so that both engines draw the same text."""

from collections.abc import Iterable

import numpy as np

UNIT = 2**-30  # of probability; sums stay below 2^31 for any vocabulary


def draws(seed: int, rows: Iterable[int], count: int) -> np.ndarray:
    """Uniform numbers in [0, 1), [rows, count] float32: those of a row do not depend on the rows beside it.

    Each row has its own stream of Philox4x64 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"). A
    token is drawn as the first at which the probabilities, added up in the order of the vocabulary, exceed its number.
    They are added as whole numbers of `UNIT`: a sum of floats, added in parallel, moves at tokens of probability zero
    too, which would then be drawn now and then.

    Args:
        rows: Numbers of rows, -1 (padding) or more.
        count: Tokens of the longest answer.
    """
    streams = (np.random.Generator(np.random.Philox(key=[seed, row + 1])) for row in rows)
    return np.array([stream.random(count, np.float32) for stream in streams], np.float32).reshape(-1, count)
