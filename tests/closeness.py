"""Check that a float32 result is as close to the exact value as another implementation's.

The error of float32 sums depends on the CPU, the libraries and the number of threads, which choose the order of
summation. The exact value, computed in float64, does not. Nor does the fact that a correct implementation's error is at
most a small multiple of another correct implementation's.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

EPS = 2.0**-23  # of float32


class Float64(TorchFunctionMode):
    """Replace float32 by float64 in calls of torch, as transformers uses float32 in norms, softmax and angles."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})

    def __enter__(self):
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(self.default)
        return super().__exit__(*error)


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model with float64 parameters; run it within `Float64`."""
    copied = copy.deepcopy(model).double()
    for module in copied.modules():  # experts that PEFT fine-tunes fully have their own configuration
        if getattr(getattr(module, "config", None), "_experts_implementation", None) is not None:
            module.config._experts_implementation = "eager"  # the grouped kernel does not support float64
    return copied


def in_both(function: Callable[[torch.nn.Module], Any], model: torch.nn.Module) -> tuple[Any, Any]:
    """Return the results of a function on a float32 model and on its float64 copy, the exact value."""
    exact = in_float64(model)  # copied first, as the function may train the model
    result = function(model)
    with Float64():
        return result, function(exact)


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss by parameter name. The model's own gradients are cleared before and after."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def assert_as_close(ours: Any, reference: Any, truth: Any, *, multiple: float = 4, terms: int = 256,
                    magnitude: float = 0.0) -> None:
    """Check that the error of a float32 result is at most `multiple` times the reference's error, plus rounding.

    Rounding is `EPS * sqrt(terms) * magnitude`; without it, a reference that happens to be exact would require every
    bit to match. An array's error is the largest of its elements. A reference that is off by a hundredth fails: its
    exact value then belongs to something else, such as other random numbers.

    Args:
        ours, reference, truth: Arrays of torch, numpy or JAX, or numbers; or dicts and sequences of them, with equal
            keys and shapes. The truth is the reference in float64. To compare two forms of one program, which have no
            float64 version, pass the reference as the truth; then only rounding is allowed.
        multiple: Maximum ratio of the two errors.
        terms: Approximate number of roundings per result; they add up like a random walk.
        magnitude: Minimum size of the terms. The size is the largest value of the exact array, and at least a hundredth
            of the largest of all arrays: what cancels in exact arithmetic, such as the gradient of a key bias, consists
            of rounding alone.
    """
    results, references, exact_arrays = (dict(_leaves(tree)) for tree in (ours, reference, truth))
    assert results.keys() == references.keys() == exact_arrays.keys(), (
        f"the arrays differ: {results.keys() ^ exact_arrays.keys()}")
    assert exact_arrays, "nothing to compare"
    largest = max(_largest(array) for array in exact_arrays.values())
    wrong = []
    for name, exact in exact_arrays.items():
        assert results[name].shape == references[name].shape == exact.shape, (name, results[name].shape, exact.shape)
        error, reference_error = (_largest(array[name] - exact) for array in (results, references))
        size = max(_largest(exact), largest / 100, magnitude)
        assert reference_error <= size / 100, f"{name}: the reference's error {reference_error:.3g} is too large"
        allowed = multiple * reference_error + EPS * terms**0.5 * size
        if not error <= allowed:  # true for NaN too
            wrong.append(f"{name or 'the result'}: error {error:.3g}, where the reference has {reference_error:.3g}; "
                         f"{allowed:.3g} is allowed for values up to {size:.3g}")
    assert not wrong, "\n".join(wrong)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a tree in float64, with their paths."""
    if isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, (tree.detach().double().numpy() if isinstance(tree, torch.Tensor) else np.asarray(tree, np.float64))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0))
