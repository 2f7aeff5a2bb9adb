"""Adapters that start as the principal part of the base (PiSSA, Meng et al. 2024): the same on both engines.

With the singular values S and vectors U, V of an adapted matrix W [out, in], truncated to the rank r, and the scaling s
of the update, A is sqrt(S / s) V^T and B is U sqrt(S / s), and the base keeps the residual W - s B A. Only A and B
train and are in checkpoints: each start recomputes the residual from the stored weights, by the same functions.

An exported adapter is for the original base, so its update is the change in training, s (B A - B0 A0) with the first
values B0 and A0. This is an ordinary adapter of rank 2 r with the factors [B - B0, B0] and [A; A - A0]. PEFT's factors
[B, -B0] and [A; A0] have the same product, but cast to 16 bits they lose small changes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from lmmods.core.errors import UserError
from lmmods.core.lazy_array import LazyArray, Part


def principal_factors(matrix: np.ndarray, rank: int, scaling: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the first A [rank, in] and B [out, rank] of an adapter, float32.

    Computed in float64 from the Gram matrix of the shorter side, whose condition number is the square of the matrix's:
    the principal vectors keep float32's digits, in a fraction of the time of a singular value decomposition. The
    largest component of each column of B is positive.

    Args:
        matrix: [out, in] float32; its shorter side is at least `rank`.
    """
    import scipy.linalg  # takes half a second

    matrix64 = matrix.astype(np.float64)
    is_tall = matrix64.shape[0] > matrix64.shape[1]
    if is_tall:
        matrix64 = matrix64.T
    last = matrix64.shape[0] - 1
    # In ascending order.
    squares, vectors = scipy.linalg.eigh(matrix64 @ matrix64.T, subset_by_index=[last - rank + 1, last])
    values, left = np.sqrt(np.maximum(squares[::-1], 0)), vectors[:, ::-1]
    right = left.T @ matrix64
    # Rows of U^T W are S V^T. If the matrix has a lower rank than the adapter, both factors are zero there.
    scales = np.where(values > values[:1] * 1e-7, values, np.inf)
    right /= np.sqrt(scales * scaling)[:, None]
    left = left * np.sqrt(np.where(np.isinf(scales), 0, values) / scaling)
    a, b = (left.T, right.T) if is_tall else (right, left)
    signs = np.where(np.take_along_axis(b, np.abs(b).argmax(0)[None], 0) < 0, -1.0, 1.0)  # [1, rank]
    return (a * signs.T).astype(np.float32), (b * signs).astype(np.float32)


def residual(matrix: np.ndarray, a: np.ndarray, b: np.ndarray, scaling: float) -> np.ndarray:
    """Return the residual of a matrix, or of a part of it, without a part of A and B: float32 [out, in]."""
    return (matrix.astype(np.float64) - scaling * (b.astype(np.float64) @ a.astype(np.float64))).astype(np.float32)


class Principal:
    """Split of a matrix [out, in] that is read lazily: as a whole only once, when A and B are first needed.

    Args:
        name: Name of the layer, for messages.
        to_float: Converts values of the matrix's library to numpy's float32; `from_float` converts them back, to the
            matrix's dtype.

    Raises:
        UserError: The matrix has fewer singular values than the adapter's rank.
    """

    def __init__(self, matrix: LazyArray, rank: int, scaling: float, name: str,
                 to_float: Callable[[Any], np.ndarray], from_float: Callable[[np.ndarray], Any]):
        check_rank(matrix.shape, rank, name)
        self._matrix, self._rank, self._scaling = matrix, rank, scaling
        self._to_float, self._from_float = to_float, from_float
        self._factors: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """A and B, float32."""
        if self._factors is None:
            whole = self._to_float(self._matrix.read_rows(slice(None)))
            self._factors = principal_factors(whole, self._rank, self._scaling)
        return self._factors

    @property
    def residual(self) -> LazyArray:
        """The residual, in the dtype and the library of the matrix."""
        def read(part: Part) -> Any:
            a, b = self.factors
            remainder = residual(self._to_float(self._matrix[part]), a[:, part[1]], b[part[0]], self._scaling)
            return self._from_float(remainder)

        return LazyArray(self._matrix.shape, self._matrix.dtype, read, self._matrix.empty)


def check_rank(shape: tuple[int, ...], rank: int, name: str) -> None:
    """Raise UserError if a matrix has fewer singular values than an adapter's rank."""
    if rank > min(shape):
        raise UserError(f"lora.rank is {rank}, but {name} has only {min(shape)} singular values, and lora.init: "
                        "pissa needs one per rank. Lower lora.rank, remove the layer from lora.targets, or set "
                        "lora.init to kaiming.")


def no_whole_weights(name: str) -> UserError:
    """Build the error for a base whose weights are saved quantised."""
    return UserError(f"lora.init is pissa, which splits matrices before they are quantised, but {name} is saved "
                     "quantised. Set model.pretrained to the unquantised model, with model.quantize, or set "
                     "lora.init to kaiming.")


def exported_factor(kind: str, value: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the two halves of an exported factor, to be concatenated along the rank.

    Args:
        kind: `lora_A` or `lora_B`.
        value: The trained factor, an array of any library.
        first: Its first value.
    """
    return (value, value - first) if kind == "lora_A" else (value - first, first)
