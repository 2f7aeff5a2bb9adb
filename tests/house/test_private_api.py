"""Private parts of libraries are used in the compat modules only, where a contract test holds each (tests/compat)."""

import inspect
import re
from importlib import import_module

import pytest

from tests.house.private_api import is_private, private_uses
from tests.house.test_architecture import MODULES, modules

COMPAT = {"lmmods.core.compat", "jax_engine.distributed.devices"}
PACKAGES = ("lmmods", "jax_engine")


def is_compat(module: str) -> bool:
    return module in COMPAT or module.startswith("lmmods.torch_engine.compat.")


def test_private_parts_of_libraries_are_used_in_compat_modules_only():
    found = private_uses(modules(), PACKAGES)
    outside = [f"{module}:{line}" for module, lines in found.items() if not is_compat(module) for line in lines]
    assert not outside, f"move it to a compat module and hold it by a test in tests/compat: {outside}"
    assert COMPAT <= found.keys()


@pytest.mark.parametrize("line", [
    "x = trainer.strategy._launcher", "from torch._C import x", "from peft.utils import _get_submodules",
    "import jax._src.core", "x = getattr(config, '_attn', None)", "torch.nn.functional.gelu = print",
    "setattr(model, '_parameters', None)", "L.seed_everything = 3"])
def test_a_new_use_is_found(line):
    assert private_uses({**modules(), "lmmods.new": line}, PACKAGES)["lmmods.new"]


@pytest.mark.parametrize("module", [name for name in MODULES if not is_compat(name)])
def test_no_private_method_or_attribute_of_a_base_class_is_replaced(module):
    """A class of ours under one of a library: a name that both define is taken from the library, knowingly or not."""
    for kind in vars(import_module(module)).values():
        if not inspect.isclass(kind) or kind.__module__ != module:
            continue
        ours = {name for name in vars(kind) if is_private(name)} | _assigned(kind)
        for base in kind.__mro__[1:]:
            library = base.__module__.split(".")[0]
            if library in ("lightning", "jinja2", "torchmetrics", "transformers"):
                shared = ours & ({name for name in vars(base) if is_private(name)} | _assigned(base))
                assert not shared - {"_abc_impl"}, f"{kind.__name__} and {base.__name__} of {library}: {shared}"


def _assigned(kind: type) -> set[str]:
    try:
        text = inspect.getsource(kind)
    except OSError:  # made at run time
        return set()
    return set(re.findall(r"\bself\.(_[a-z]\w*)(?:: [^=\n]+)? = ", text))
