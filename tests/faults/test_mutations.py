"""Recipes as strangers write them: shipped ones with keys misspelt, moved, missing or added, and values of any kind.

One property: a command ends with 0, 2 or 130. Status 2 comes with one message and no traceback, and writes nothing.
LMMODS_MUTATIONS sets how many are tried for each engine.
"""

import copy
import json
import os
import random
import traceback
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lmmods.cli import main

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))
OFFLINE = [path for path in RECIPES if path.parent.name == "configs" and path.stem != "smoke"]
NUMBER = int(os.environ.get("LMMODS_MUTATIONS", "20"))

STRANGE = [None, True, False, 0, 1, -1, 2, 3, 0.5, -0.5, 1.5, float("nan"), float("inf"), -float("inf"), 1e308, 1e-320,
           2**31, 2**63, 10**30, "", " ", "abc", "0", "1", "-1", "none", "null", "true", "1e999", "auto", "all", "last",
           "\0", "a\nb", "ü" * 3, "x" * 5000, "../..", "/", "/dev/null", "${HOME}", "{{ 7 }}", "os.system", "http://",
           [], [[]], [None], [1, 2], ["a"], {}, {"a": 1}, {"class_path": "os.system"}, {"class_path": "nothing"},
           {"class_path": "lightning.Trainer", "init_args": {"max_steps": 1}}, [{"class_path": "LambdaCallback"}],
           {"init_args": {}}, {"path": "x", "limit": -1}]
# Overlay by which a recipe that a mutation leaves whole ends in seconds.
SMALL = {"trainer": {"logger": None, "num_sanity_val_steps": 0, "limit_val_batches": 1, "max_steps": 2,
                     "max_epochs": None, "val_check_interval": 1, "accelerator": "cpu", "devices": 1,
                     "enable_progress_bar": False, "log_every_n_steps": 1},
         "samples": {"prompts": None}}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, str]:
    """The demo's data, a few rows of each file."""
    folder = tmp_path_factory.mktemp("few")
    made = {}
    for name in ("instructions.jsonl", "instructions_heldout.jsonl", "preferences.jsonl", "preferences_heldout.jsonl",
                 "corpus/train.txt", "corpus/val.txt"):
        lines = (ROOT / "demo" / name).read_text().splitlines(keepends=True)[:60]
        (folder / Path(name).name).write_text("".join(lines))
        made[f"demo/{name}"] = str(folder / Path(name).name)
    for name in ("train", "dev"):
        content = json.loads((ROOT / "demo/squad" / f"{name}.json").read_text())
        content["data"] = content["data"][:1]
        content["data"][0]["paragraphs"] = content["data"][0]["paragraphs"][:2]
        (folder / f"{name}.json").write_text(json.dumps(content))
        made[f"demo/squad/{name}.json"] = str(folder / f"{name}.json")
    return made


def overlaid(tree: dict, over: dict) -> dict:
    """`tree` with the values of `over` in their places."""
    result = dict(tree)
    for key, value in over.items():
        inner = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = overlaid(result[key], value) if inner else value
    return result


def small(path: Path, sources: dict[str, str], root: Path) -> dict:
    """A shipped recipe, on few rows, in a run folder of its own."""
    text = path.read_text()
    for name, few in sources.items():
        text = text.replace(f" {name}", f" {few}")
    tree = overlaid(yaml.safe_load(text), SMALL)
    tree["trainer"]["default_root_dir"] = str(root)
    return tree


def places(tree: object, prefix: tuple = ()) -> list[tuple]:
    """Path of every key."""
    found = []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        found += [(*prefix, key), *places(value, (*prefix, key))]
    return found


def node(tree: object, path: tuple) -> object:
    for key in path:
        tree = tree[key]
    return tree


def mutate(tree: dict, every_key: list[tuple], chance: random.Random) -> tuple[dict, str]:
    """One mutation of a recipe, and what it is.

    Args:
        every_key: Paths of all keys that the recipe may have; most take their default in it.
    """
    tree = copy.deepcopy(tree)
    kind = chance.choice(["value", "value", "default", "default", "default", "rename", "delete", "add", "move", "type"])
    *parents, last = chance.choice(every_key if kind == "default" else places(tree))
    value = chance.choice(STRANGE)
    if kind == "default":
        inner = tree
        for key in parents:
            inner[key] = inner.get(key) if isinstance(inner.get(key), dict) else {}
            inner = inner[key]
        inner[last] = value
        return tree, f"{'.'.join(map(str, (*parents, last)))} = {value!r:.60}"
    inner = node(tree, parents)
    what = ".".join(map(str, (*parents, last)))
    if kind == "value" or isinstance(inner, list):
        inner[last] = value
        return tree, f"{what} = {value!r:.60}"
    old = inner.pop(last)
    if kind == "rename":
        inner[chance.choice([last[:-1], last + "s", last.upper(), last.replace("_", "-"), 7, None, True, ""])] = old
    elif kind == "add":
        inner[last], inner[chance.choice(["surprise", "class_path", "init_args", "config", "dict_kwargs"])] = old, value
    elif kind == "move":
        other = chance.choice([place for place in places(tree) if isinstance(node(tree, place), dict)])
        node(tree, other)[last] = old
    elif kind == "type":
        inner[last] = chance.choice([[old], {"value": old}, str(old), [old, old], json.dumps(str(old))])
    return tree, f"{kind} {what}"


@pytest.fixture(scope="module")
def every_key(sources, tmp_path_factory):
    """Recipe and engine -> paths of all its keys."""
    import contextlib
    import io

    found = {}
    for path in OFFLINE:
        for engine in ("torch", "jax"):
            written = tmp_path_factory.mktemp("whole") / "recipe.yaml"
            written.write_text(yaml.safe_dump({**small(path, sources, Path("x")), "engine": engine}))
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                assert main(["fit", "--config", str(written), "--print_config"]) == 0
            keys = places(yaml.safe_load(out.getvalue()))
            found[path.stem, engine] = [key for key in keys if not any(isinstance(part, int) for part in key)]
    return found


def attempt(arguments: list[str], capfd) -> tuple[int | None, str]:
    """Run a command; its status, and how it breaks the property (nothing where it does not)."""
    capfd.readouterr()
    try:
        status = main(arguments)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return None, f"{type(error).__name__}: {str(error)[:300]} at {where.filename}:{where.lineno}"
    said = capfd.readouterr()
    told = [line for line in said.err.splitlines() if line.startswith("error: ")]
    if status not in (0, 2, 130):
        return status, f"status {status}"
    if "Traceback" in said.err + said.out:
        return status, said.err
    if status == 2 and (len(told) != 1 or len(said.err.partition("error: ")[2]) < 13):
        return status, f"says {said.err!r}"
    return status, ""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_mutated_recipe_is_run_or_refused_in_one_message(engine, sources, every_key, short_runs, settings_restored,
                                                          tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
    numbers = iter(range(10**9))
    statuses, failures = [], []

    @settings(max_examples=NUMBER, derandomize=NUMBER == 20, deadline=None, database=None,
              phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(OFFLINE), st.integers(0, 2**32 - 1), st.sampled_from(["fit", "fit", "inspect", "predict"]))
    def check(path, seed, command):
        root = tmp_path / f"run{next(numbers)}"
        tree = {**small(path, sources, root), "engine": engine}
        tree, what = mutate(tree, every_key[path.stem, engine], random.Random(seed))
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(tree, allow_unicode=True))
        short_runs()
        status, broken = attempt([command, "--config", str(recipe)], capfd)
        if not broken and status == 2 and root.exists() and not (root / "config.yaml").exists():
            broken = f"leaves {list(root.iterdir())}"
        statuses.append(status)
        if broken:
            failures.append(f"{command} {path.stem}: {what}: {broken}")

    check()
    assert not failures, f"{len(failures)} of {len(statuses)}:\n" + "\n".join(failures)
    assert {0, 2} <= set(statuses)  # it does refuse, and it does train


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_mutated_recipes_are_parsed_or_refused(path, sources, settings_restored, tmp_path, monkeypatch, capfd):
    """All shipped recipes, those for real models too, as far as `--print_config` goes."""
    monkeypatch.chdir(ROOT)
    chance = random.Random(path.stem)
    base = yaml.safe_load(path.read_text())
    failures = []
    for _ in range(max(NUMBER // 5, 2)):
        tree, what = mutate(base, places(base), chance)
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(tree, allow_unicode=True))
        layers = ["--config", "configs/sft_qlora.yaml"] if path.stem == "smoke" else []
        _, broken = attempt(["fit", *layers, "--config", str(recipe), "--print_config"], capfd)
        failures += [f"{what}: {broken}"] if broken else []
    assert not failures, "\n".join(failures)
