"""The arrows between the folders, read from the imports; no circle of files; no setting that nobody reads."""

import ast
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

from lmmods.core.settings import Generation
from tests.house.dead_settings import dead_settings

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "lmmods").rglob("*.py")) + sorted((ROOT / "jax_engine").rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES
           if path.name != "__init__.py"}

# Each room may use those to its left, and itself. The two engines never use each other.
ROOMS = ["lmmods.core", "lmmods.recipe", "lmmods.data", "lmmods.runs", "lmmods.evaluation", "lmmods.rollouts",
         "lmmods.torch_engine", "jax_engine", "lmmods.commands", "lmmods.extras", "lmmods.strategies", "lmmods.cli"]
# The same inside rooms; what lies in none of these folders may use all of them.
INSIDE = {
    "lmmods.data": ["read", "encode", "store", "order", "batch", "scoring"],
    "lmmods.torch_engine": ["compat", "nn", "strategies", "tasks", "callbacks"],
    "jax_engine": ["distributed", "models", "tasks"],
}
# Libraries that whole rooms do without.
WITHOUT = {
    "lmmods": ["jax", "flax", "optax"],
    "jax_engine": ["torch", "lightning", "lmmods.torch_engine"],
    "lmmods.torch_engine": ["jax_engine"],
    "lmmods.core": ["torch", "lightning"],
    "lmmods.runs": ["torch"],
}


# Fields that nothing reads, and why they stand.
UNREAD = {
    ("lmmods.evaluation.early_stopping.EarlyStoppingRule", "log_rank_zero_only"): "documented: one process speaks",
    ("lmmods.recipe.block_fields.PublishFields", "license"): "the model card reads it from the recipe",
}


@cache
def imports(module: str) -> frozenset[str]:
    """Every module or name that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return frozenset(found)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def place(name: str, rooms: list[str]) -> int | None:
    return next((number for number, room in enumerate(rooms) if within(name, room)), None)


def edges(module: str) -> set[str]:
    """Files of ours that a file imports."""
    return {name for name in imports(module) if name in MODULES} - {module}


@pytest.mark.parametrize("module", MODULES)
def test_arrows_between_folders_point_one_way(module):
    room = place(module, ROOMS)
    assert room is not None, "in no room"
    for name in edges(module):
        other = place(name, ROOMS)
        assert other <= room and {ROOMS[room], ROOMS[other]} != {"lmmods.torch_engine", "jax_engine"}, name
    for package, folders in INSIDE.items():
        if within(module, package):
            here = place(module, [f"{package}.{folder}" for folder in folders])
            for name in edges(module):
                there = place(name, [f"{package}.{folder}" for folder in folders])
                assert not within(name, package) or here is None or there is not None and there <= here, name
    for package, libraries in WITHOUT.items():
        if within(module, package):
            assert not {name for name in imports(module) if any(within(name, library) for library in libraries)}


def test_no_circle_of_files():
    """Each file can be read after those that it imports."""
    left = {module: edges(module) for module in MODULES}
    while ready := [module for module, wanted in left.items() if not wanted & left.keys()]:
        for module in ready:
            del left[module]
    assert not left, f"these import each other in a circle, or stand behind one: {sorted(left)}"


def test_package_markers_are_empty():
    assert all(not path.read_text() for path in SOURCES if path.name == "__init__.py")


def modules() -> dict[str, str]:
    """Source by dotted name."""
    return {module: path.read_text() for module, path in MODULES.items()}


def test_every_setting_is_read():
    """Of every constructor in both engines: a field that is only declared, stored or checked would be ignored."""
    templates = "".join(path.read_text() for path in ROOT.glob("lmmods/**/*.jinja"))
    dead = dead_settings(modules(), templates)
    # Lightning reads its own: each is a parameter of its Trainer (tests/recipe/test_reader.py).
    assert {(owner, name) for owner, name in dead if not owner.endswith(".TorchTrainerFields")} == UNREAD.keys()


@pytest.mark.parametrize(("engine", "unread"), [
    ("lmmods.torch_engine", set()),
    # What the table SUPPORTED of jax_engine/tasks/base.py refuses, and what its documentation says changes nothing.
    ("jax_engine", {"max_memory", "quant_storage"})])
def test_each_engine_reads_the_fields_of_its_tasks(engine, unread):
    other = ({"lmmods.torch_engine", "jax_engine"} - {engine}).pop()
    found = dead_settings({module: text for module, text in modules().items() if not within(module, other)})
    assert {field for owner, field in found if owner.startswith("lmmods.recipe.tasks.")
            and not owner.endswith("DataFields")} == unread


def test_a_setting_that_nobody_reads_is_found():
    """A field put into any constructor, and one whose reader is taken away."""
    sources, wanted = modules(), set()
    before = dead_settings(sources)
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
            wanted.add((f"{module}.{node.name}", "ignored"))
        sources[module] = ast.unparse(ast.fix_missing_locations(tree))
    assert len(wanted) > 60 and dead_settings(sources) - before == wanted
    sources = modules()
    text = sources["lmmods.data.sft"]
    sources["lmmods.data.sft"] = text.replace("settings.chat_template_kwargs", "other")
    assert dead_settings(sources) - before == {("lmmods.recipe.tasks.base.ConversationFields", "chat_template_kwargs")}


def test_generation_hands_every_option_on():
    from lmmods.torch_engine.tasks.causal_task import generation_config

    class Tokenizer:
        pad_token_id, bos_token_id = 0, 1

    chosen = Generation(max_new_tokens=9, min_new_tokens=2, do_sample=True, num_beams=4, num_beam_groups=2,
                        penalty_alpha=0.6, use_cache=False, temperature=0.7, top_k=5, top_p=0.9, typical_p=0.8,
                        diversity_penalty=0.3, repetition_penalty=1.2, length_penalty=0.5, no_repeat_ngram_size=3)
    config = generation_config(chosen, Tokenizer(), [2, 3])
    assert all(getattr(config, field.name) == getattr(chosen, field.name) for field in dataclasses.fields(Generation))
    assert config.eos_token_id == [2, 3]


def test_the_suite_compiles_as_users_do():
    """It sets no flag of a compiler: how many devices a CPU stands for, and how long they wait, change no program."""
    texts = [*(ROOT / "tests").rglob("*.py"), *(ROOT / ".ci").iterdir(), *(ROOT / ".github" / "workflows").iterdir(),
             ROOT / "Makefile", ROOT / "pyproject.toml"]
    flags = re.compile(r"--(xla_\w+)|(LIBTPU_INIT[_]ARGS|TORCHINDUCTOR[_]\w+|jax_disable[_]most_\w+)")
    found = {first or second for path in texts for first, second in flags.findall(path.read_text())}
    assert found == {"xla_force_host_platform_device_count", "xla_cpu_collective_call_terminate_timeout_seconds"}
