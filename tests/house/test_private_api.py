"""Private parts of libraries are used in compat modules only, each with a contract test in tests/compat."""

import inspect
import re
from importlib import import_module

from tests.house.private_api import find_private_uses, is_private
from tests.house.test_architecture import MODULES, read_modules

COMPAT = {"lmmods.core.compat", "jax_engine.distributed.devices"}
PACKAGES = ("lmmods", "jax_engine")


def is_compat(module: str) -> bool:
    return module in COMPAT or module.startswith("lmmods.torch_engine.compat.")


def test_private_parts_of_libraries_are_used_in_compat_modules_only():
    uses = find_private_uses(read_modules(), PACKAGES)
    outside = [f"{module}:{line}" for module, lines in uses.items() if not is_compat(module) for line in lines]
    assert not outside, f"move it to a compat module and add a test to tests/compat: {outside}"
    assert COMPAT <= uses.keys()


def test_new_uses_of_private_parts_are_found():
    lines = ["x = trainer.strategy._launcher", "from torch._C import x", "from peft.utils import _get_submodules",
             "import jax._src.core", "x = getattr(config, '_attn', None)", "torch.nn.functional.gelu = print",
             "setattr(model, '_parameters', None)", "L.seed_everything = 3"]
    new = {f"lmmods.new{index}": line for index, line in enumerate(lines)}
    assert new.keys() <= find_private_uses({**read_modules(), **new}, PACKAGES).keys()


def test_no_private_name_of_a_library_class_is_overridden():
    """A private name defined by both our class and its library base would override the library's by accident."""
    for module in MODULES:
        for cls in vars(import_module(module)).values() if not is_compat(module) else ():
            if not inspect.isclass(cls) or cls.__module__ != module:
                continue
            own_names = {name for name in vars(cls) if is_private(name)} | _find_assigned(cls)
            for base in cls.__mro__[1:]:
                library = base.__module__.split(".")[0]
                if library in ("lightning", "jinja2", "torchmetrics", "transformers"):
                    shared = own_names & ({name for name in vars(base) if is_private(name)} | _find_assigned(base))
                    assert not shared - {"_abc_impl"}, f"{cls.__name__} and {base.__name__} of {library}: {shared}"


def _find_assigned(cls: type) -> set[str]:
    try:
        source = inspect.getsource(cls)
    except OSError:  # created at run time
        return set()
    return set(re.findall(r"\bself\.(_[a-z]\w*)(?:: [^=\n]+)? = ", source))
