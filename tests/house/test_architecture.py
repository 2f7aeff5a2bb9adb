"""Imports between folders point one way, without circles; every setting is read."""

import ast
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

from lmmods.core.settings import Generation
from tests.house.dead_settings import find_dead_settings

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "lmmods").rglob("*.py")) + sorted((ROOT / "jax_engine").rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES
           if path.name != "__init__.py"}

# Each layer may import itself and those to its left. The engines never import each other.
LAYERS = ["lmmods.core", "lmmods.recipe", "lmmods.data", "lmmods.runs", "lmmods.evaluation", "lmmods.rollouts",
          "lmmods.torch_engine", "jax_engine", "lmmods.commands", "lmmods.extras", "lmmods.strategies", "lmmods.cli"]
# The same order inside layers; files outside these folders may import all of them.
FOLDERS = {
    "lmmods.data": ["read", "encode", "store", "order", "batch", "scoring"],
    "lmmods.torch_engine": ["compat", "nn", "strategies", "tasks", "callbacks"],
    "jax_engine": ["distributed", "models", "tasks"],
}
# Libraries that a layer must not import.
WITHOUT = {
    "lmmods": ["jax", "flax", "optax"],
    "jax_engine": ["torch", "lightning", "lmmods.torch_engine"],
    "lmmods.torch_engine": ["jax_engine"],
    "lmmods.core": ["torch", "lightning"],
    "lmmods.runs": ["torch"],
}


# Fields that no code reads, and why they exist.
UNREAD = {
    ("lmmods.evaluation.early_stopping.EarlyStoppingRule", "log_rank_zero_only"): "documented: one process speaks",
    ("lmmods.recipe.block_fields.PublishFields", "license"): "the model card reads it from the recipe",
}


@cache
def read_imports(module: str) -> frozenset[str]:
    """Return every module or name that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return frozenset(names)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def find_index(name: str, layers: list[str]) -> int | None:
    return next((index for index, layer in enumerate(layers) if is_within(name, layer)), None)


def find_imported_files(module: str) -> set[str]:
    """Return the files of ours that a file imports."""
    return {name for name in read_imports(module) if name in MODULES} - {module}


def test_folders_import_only_from_lower_layers():
    for module in MODULES:
        layer, imports = find_index(module, LAYERS), find_imported_files(module)
        assert layer is not None, f"{module} is in no layer"
        for name in imports:
            other = find_index(name, LAYERS)
            is_lower = other <= layer and {LAYERS[layer], LAYERS[other]} != {"lmmods.torch_engine", "jax_engine"}
            assert is_lower, f"{module} imports {name}"
        for package, folders in FOLDERS.items():
            inner = find_index(module, [f"{package}.{folder}" for folder in folders])
            for name in imports if is_within(module, package) and inner is not None else ():
                imported = find_index(name, [f"{package}.{folder}" for folder in folders])
                is_lower = not is_within(name, package) or imported is not None and imported <= inner
                assert is_lower, f"{module} imports {name}"
        for package, libraries in WITHOUT.items():
            if is_within(module, package):
                unwanted = {name for name in read_imports(module) if any(is_within(name, item) for item in libraries)}
                assert not unwanted, f"{module} imports {unwanted}"


def test_there_are_no_circular_imports():
    unresolved = {module: find_imported_files(module) for module in MODULES}
    while ready := [module for module, imported in unresolved.items() if not imported & unresolved.keys()]:
        for module in ready:
            del unresolved[module]
    assert not unresolved, f"circular imports, or files that import them: {sorted(unresolved)}"


def test_init_files_are_empty():
    assert all(not path.read_text() for path in SOURCES if path.name == "__init__.py")


def read_modules() -> dict[str, str]:
    """Return the source of each module by dotted name."""
    return {module: path.read_text() for module, path in MODULES.items()}


def test_every_setting_is_read():
    """A constructor field that is only declared, stored or checked would be ignored."""
    templates = "".join(path.read_text() for path in ROOT.glob("lmmods/**/*.jinja"))
    dead = find_dead_settings(read_modules(), templates)
    # Lightning reads its own: each is a parameter of its Trainer (tests/recipe/test_reader.py).
    assert {(owner, name) for owner, name in dead if not owner.endswith(".TorchTrainerFields")} == UNREAD.keys()


@pytest.mark.parametrize(("engine", "unread"), [
    ("lmmods.torch_engine", set()),
    # Rejected by the table SUPPORTED in jax_engine/tasks/base.py, or documented as without effect.
    ("jax_engine", {"cuda_graphs", "max_memory", "quant_storage"})])
def test_each_engine_reads_the_fields_of_its_tasks(engine, unread):
    other = ({"lmmods.torch_engine", "jax_engine"} - {engine}).pop()
    dead = find_dead_settings({module: text for module, text in read_modules().items() if not is_within(module, other)})
    assert {field for owner, field in dead if owner.startswith("lmmods.recipe.tasks.")
            and not owner.endswith("DataFields")} == unread


def test_a_dead_setting_is_found():
    """Test an unread field added to every constructor, and a field whose reader is removed."""
    sources, expected = read_modules(), set()
    before = find_dead_settings(sources)
    for module, text in sources.items():
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            start = next((item for item in node.body if getattr(item, "name", None) == "__init__"), None)
            if start is not None:
                start.args.kwonlyargs.append(ast.arg("ignored"))
                start.args.kw_defaults.append(ast.Constant(0))
                start.body += ast.parse("check_range(ignored=(ignored, 0))\nself.ignored = ignored").body
            elif any("dataclass" in ast.unparse(item) for item in node.decorator_list):
                node.body += ast.parse("ignored: int = 0").body
            else:
                continue
            expected.add((f"{module}.{node.name}", "ignored"))
        sources[module] = ast.unparse(ast.fix_missing_locations(tree))
    assert len(expected) > 60 and find_dead_settings(sources) - before == expected
    sources = read_modules()
    text = sources["lmmods.data.conversations"]
    sources["lmmods.data.conversations"] = text.replace("settings.chat_template_kwargs", "other")
    assert find_dead_settings(sources) - before == {
        ("lmmods.recipe.tasks.base.ConversationFields", "chat_template_kwargs")}


def test_every_generation_setting_reaches_transformers():
    from lmmods.torch_engine.tasks.causal_task import generation_config

    class Tokenizer:
        pad_token_id, bos_token_id = 0, 1

    settings = Generation(max_new_tokens=9, min_new_tokens=2, do_sample=True, num_beams=4, num_beam_groups=2,
                          penalty_alpha=0.6, use_cache=False, temperature=0.7, top_k=5, top_p=0.9, typical_p=0.8,
                          diversity_penalty=0.3, repetition_penalty=1.2, length_penalty=0.5, no_repeat_ngram_size=3)
    config = generation_config(settings, Tokenizer(), [2, 3])
    assert all(getattr(config, field.name) == getattr(settings, field.name) for field in dataclasses.fields(Generation))
    assert config.eos_token_id == [2, 3]


def test_the_tests_set_no_compiler_flags():
    """So they compile as users do; the number of CPU devices and their timeout do not change a program."""
    texts = [*(ROOT / "tests").rglob("*.py"), *(ROOT / ".ci").iterdir(), *(ROOT / ".github" / "workflows").iterdir(),
             ROOT / "Makefile", ROOT / "pyproject.toml"]
    flags = re.compile(r"--(xla_\w+)|(LIBTPU_INIT[_]ARGS|TORCHINDUCTOR[_]\w+|jax_disable[_]most_\w+)")
    matches = {first or second for path in texts for first, second in flags.findall(path.read_text())}
    assert matches == {"xla_force_host_platform_device_count", "xla_cpu_collective_call_terminate_timeout_seconds"}
