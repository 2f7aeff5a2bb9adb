"""The arrows between the packages, read from the imports, and no setting that nobody reads."""

import ast
import dataclasses
from pathlib import Path

import pytest

from lmmods.settings import Generation
from tests.dead_settings import dead_settings

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "lmmods").rglob("*.py")) + sorted((ROOT / "jax_engine").rglob("*.py"))

# Fields that nothing reads, and why they stand.
UNREAD = {
    ("jax_engine.models.decoder.DecoderEmbedding", "build"): "constructed as EncoderEmbedding is, which reads it",
    ("jax_engine.tasks.base.Task", "compile"): "documented: everything is compiled",
    ("jax_engine.tasks.base.Task", "quant_storage"): "documented: torch's alone, it changes no number",
    ("lmmods.evaluation.early_stopping.EarlyStoppingRule", "log_rank_zero_only"): "documented: one process speaks",
    ("lmmods.publishing.Publisher", "license"): "the model card reads it from the recipe",
}


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


def modules() -> dict[str, str]:
    """Source by dotted name."""
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in SOURCES}


def test_every_setting_is_read():
    """Of every constructor in both engines: a field that is only declared, stored or checked would be ignored."""
    templates = "".join(path.read_text() for path in ROOT.glob("lmmods/**/*.jinja"))
    assert dead_settings(modules(), templates) == UNREAD.keys()


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
    sources["lmmods.data.sft"] = text.replace("self.train_on_last, self.roles", "False, self.roles")
    assert dead_settings(sources) - before == {("lmmods.data.sft.SFTData", "train_on_last")}


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
