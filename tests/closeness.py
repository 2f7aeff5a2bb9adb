"""How near a float32 result is to the truth, judged by how near another implementation comes.

How far float32 sums are from the truth depends on the CPU, the libraries and the number of threads, which choose the
order of summands. What does not is the truth, computed in float64, and that a right implementation misses it by no more
than another right one does, up to a small factor.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

EPS = 2.0**-23  # of float32


class Float64(TorchFunctionMode):
    """Within it, what asks torch for float32 gets float64, as norms, softmax and rotary angles of transformers do."""

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
    """A copy of a model whose parameters are float64; run it within `Float64`."""
    found = copy.deepcopy(model).double()
    for part in found.modules():  # the experts too: those that PEFT trains in full have a configuration of their own
        if getattr(getattr(part, "config", None), "_experts_implementation", None) is not None:
            part.config._experts_implementation = "eager"  # the kernel for groups takes no float64
    return found


def in_both(function: Callable[[torch.nn.Module], Any], model: torch.nn.Module) -> tuple[Any, Any]:
    """What a function makes of a float32 model, and the truth: what it makes of a copy in float64."""
    exact = in_float64(model)  # before a function that trains
    found = function(model)
    with Float64():
        return found, function(exact)


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a loss alone, by the names of the parameters it reaches; those the model had are dropped, too."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_as_close(ours: Any, reference: Any, truth: Any, *, multiple: float = 4, terms: int = 256,
                    magnitude: float = 0.0) -> None:
    """Hold a float32 result against the truth: no farther from it than a multiple of the reference's distance.

    To this comes rounding of the size of the sum, `EPS * sqrt(terms) * magnitude`, or a reference that happens to be
    right in every bit would ask the same of us. Distances are the largest of an array. A reference that is off by a
    hundredth says that the truth is of something else, as of other random numbers, and judges nothing.

    Args:
        ours, reference, truth: Arrays of torch, numpy or JAX, or numbers; or dicts and sequences of them, alike in keys
            and shapes. The truth is the reference's in float64; of two forms of one program, which has none, the
            reference stands for it, and rounding of the size of the sum is what is allowed.
        multiple: Of the reference's distance.
        terms: About how many roundings lie on the way to a number; they add up like a random walk.
        magnitude: Of the terms, at least. It is taken to be the largest of an array of the truth, and no less than a
            hundredth of the largest of all arrays: what cancels in exact arithmetic, as the gradient of a key's bias,
            has rounding alone.
    """
    found, beside, wanted = (dict(_leaves(tree)) for tree in (ours, reference, truth))
    assert found.keys() == beside.keys() == wanted.keys(), f"not the same arrays: {found.keys() ^ wanted.keys()}"
    assert wanted, "nothing to compare"
    largest = max(_largest(array) for array in wanted.values())
    wrong = []
    for name, exact in wanted.items():
        assert found[name].shape == beside[name].shape == exact.shape, (name, found[name].shape, exact.shape)
        mine, theirs = (_largest(array[name] - exact) for array in (found, beside))
        size = max(_largest(exact), largest / 100, magnitude)
        assert theirs <= size / 100, f"{name}: the reference is {theirs:.3g} from what is no truth of it"
        allowed = multiple * theirs + EPS * terms**0.5 * size
        if not mine <= allowed:  # nor is NaN
            wrong.append(f"{name or 'the result'}: {mine:.3g} from the truth, where the reference is {theirs:.3g} from "
                         f"it; {allowed:.3g} is allowed in numbers of up to {size:.3g}")
    assert not wrong, "\n".join(wrong)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Arrays of a tree in float64, by their path."""
    if isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, (tree.detach().double().numpy() if isinstance(tree, torch.Tensor) else np.asarray(tree, np.float64))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0))
