"""The arrows between the packages, read from the imports, and no setting that nobody reads."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from lmmods.settings import Generation, LoRA, Optimizer

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "lmmods").rglob("*.py")) + sorted((ROOT / "jax_engine").rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def reaches(path: Path, *packages: str) -> set[str]:
    return {name for name in imports(path) if any(name == p or name.startswith(f"{p}.") for p in packages)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_one_way(path):
    place = path.relative_to(ROOT).parts
    if place[0] == "lmmods":
        assert not reaches(path, "jax", "flax", "optax", "orbax") and not reaches(path, "jax_engine")
    if place[:2] == ("lmmods", "data"):
        assert not reaches(path, "lmmods.modules", "lmmods.callbacks", "lmmods.trainer", "lmmods.cli")
    if place[:2] == ("lmmods", "modules"):
        assert not reaches(path, "lmmods.data", "lmmods.callbacks", "lmmods.trainer", "lmmods.cli")
    if place[0] == "jax_engine":
        assert not reaches(path, "torch", "lightning", "lmmods.modules", "lmmods.callbacks", "lmmods.trainer")
    if place[:2] in (("lmmods", "runs"), ("lmmods", "settings.py"), ("lmmods", "metrics.py")):
        assert not reaches(path, "torch", "lightning", "transformers")


def test_package_markers_are_empty():
    assert all(not path.read_text() for path in SOURCES if path.name == "__init__.py")


def settings() -> list[tuple[str, str]]:
    from lmmods.callbacks.checkpoint import Checkpoint
    from lmmods.data.clm import CLMData
    from lmmods.data.sft import SFTData
    from lmmods.modules.clm import CLM
    from lmmods.modules.sft import SFT

    found = [(cls.__name__, field.name) for cls in (Optimizer, LoRA) for field in dataclasses.fields(cls)]
    for cls in (SFT, CLM, SFTData, CLMData, Checkpoint):
        for base in cls.__mro__:
            if base.__module__.startswith("lmmods"):
                found += [(cls.__name__, name) for name in inspect.signature(base.__init__).parameters
                          if name not in ("self", "kwargs", "common")]
    return sorted(set(found))


@pytest.mark.parametrize(("owner", "name"), settings(), ids="-".join)
def test_every_setting_is_read(owner, name):
    """Read as an attribute or handed on by name, somewhere; a setting that is only declared would be ignored."""
    code = "\n".join(path.read_text() for path in SOURCES)
    assert re.search(rf"(\.{name}\b(?!\s*=[^=]))|(\b{name}={name}\b)|(\"{name}\": {name}\b)|(=\s*{name}\b)", code), name


def test_generation_hands_every_option_on():
    from lmmods.modules.generation import generation_config

    class Tokenizer:
        pad_token_id, bos_token_id = 0, 1

    chosen = Generation(max_new_tokens=9, min_new_tokens=2, do_sample=True, num_beams=4, num_beam_groups=2,
                        penalty_alpha=0.6, use_cache=False, temperature=0.7, top_k=5, top_p=0.9, typical_p=0.8,
                        diversity_penalty=0.3, repetition_penalty=1.2, length_penalty=0.5, no_repeat_ngram_size=3)
    config = generation_config(chosen, Tokenizer(), [2, 3])
    assert all(getattr(config, field.name) == getattr(chosen, field.name) for field in dataclasses.fields(Generation))
    assert config.eos_token_id == [2, 3]
