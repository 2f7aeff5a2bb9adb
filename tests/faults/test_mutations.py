"""Mutated recipes: shipped ones with keys misspelt, moved, missing or added, and values of any type.

The property: a command ends with status 0, 2 or 130. Status 2 comes with one message and no traceback, and writes
nothing. LMMODS_MUTATIONS sets the number of mutations per engine.
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
NUM_MUTATIONS = int(os.environ.get("LMMODS_MUTATIONS", "20"))

STRANGE = [None, True, False, 0, 1, -1, 2, 3, 0.5, -0.5, 1.5, float("nan"), float("inf"), -float("inf"), 1e308, 1e-320,
           2**31, 2**63, 10**30, "", " ", "abc", "0", "1", "-1", "none", "null", "true", "1e999", "auto", "all", "last",
           "\0", "a\nb", "ü" * 3, "x" * 5000, "../..", "/", "/dev/null", "${HOME}", "{{ 7 }}", "os.system", "http://",
           [], [[]], [None], [1, 2], ["a"], {}, {"a": 1}, {"class_path": "os.system"}, {"class_path": "nothing"},
           {"class_path": "lightning.Trainer", "init_args": {"max_steps": 1}}, [{"class_path": "LambdaCallback"}],
           {"init_args": {}}, {"path": "x", "limit": -1}]
# Overrides that make a valid recipe end in seconds.
SMALL = {"trainer": {"logger": None, "num_sanity_val_steps": 0, "limit_val_batches": 1, "max_steps": 2,
                     "max_epochs": None, "val_check_interval": 1, "accelerator": "cpu", "devices": 1,
                     "enable_progress_bar": False, "log_every_n_steps": 1},
         "samples": {"prompts": None}}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, str]:
    """Return copies of the demo's data files with a few rows each."""
    folder = tmp_path_factory.mktemp("few")
    copies = {}
    for name in ("instructions.jsonl", "instructions_heldout.jsonl", "preferences.jsonl", "preferences_heldout.jsonl",
                 "corpus/train.txt", "corpus/val.txt"):
        lines = (ROOT / "demo" / name).read_text().splitlines(keepends=True)[:60]
        (folder / Path(name).name).write_text("".join(lines))
        copies[f"demo/{name}"] = str(folder / Path(name).name)
    for name in ("train", "dev"):
        content = json.loads((ROOT / "demo/squad" / f"{name}.json").read_text())
        content["data"] = content["data"][:1]
        content["data"][0]["paragraphs"] = content["data"][0]["paragraphs"][:2]
        (folder / f"{name}.json").write_text(json.dumps(content))
        copies[f"demo/squad/{name}.json"] = str(folder / f"{name}.json")
    return copies


def merge_trees(tree: dict, over: dict) -> dict:
    """Return `tree` with the values of `over`, merged recursively."""
    result = dict(tree)
    for key, value in over.items():
        inner = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge_trees(result[key], value) if inner else value
    return result


def shrink_recipe(path: Path, sources: dict[str, str], root: Path) -> dict:
    """Return a shipped recipe with few rows and its own run folder."""
    text = path.read_text()
    for name, copy_path in sources.items():
        text = text.replace(f" {name}", f" {copy_path}")
    tree = merge_trees(yaml.safe_load(text), SMALL)
    tree["trainer"]["default_root_dir"] = str(root)
    return tree


def key_paths(tree: object, prefix: tuple = ()) -> list[tuple]:
    """Return the path of every key."""
    paths = []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        paths += [(*prefix, key), *key_paths(value, (*prefix, key))]
    return paths


def get_node(tree: object, path: tuple) -> object:
    for key in path:
        tree = tree[key]
    return tree


def mutate(tree: dict, every_key: list[tuple], rng: random.Random) -> tuple[dict, str]:
    """Return a mutated copy of a recipe and a description of the mutation.

    Args:
        every_key: Paths of all keys that the recipe may have.
    """
    tree = copy.deepcopy(tree)
    action = rng.choice(["value", "value", "default", "default", "default", "rename", "delete", "add", "move", "type"])
    *parents, last = rng.choice(every_key if action == "default" else key_paths(tree))
    value = rng.choice(STRANGE)
    if action == "default":
        inner = tree
        for key in parents:
            inner[key] = inner.get(key) if isinstance(inner.get(key), dict) else {}
            inner = inner[key]
        inner[last] = value
        return tree, f"{'.'.join(map(str, (*parents, last)))} = {value!r:.60}"
    inner = get_node(tree, parents)
    description = ".".join(map(str, (*parents, last)))
    if action == "value" or isinstance(inner, list):
        inner[last] = value
        return tree, f"{description} = {value!r:.60}"
    old = inner.pop(last)
    if action == "rename":
        inner[rng.choice([last[:-1], last + "s", last.upper(), last.replace("_", "-"), 7, None, True, ""])] = old
    elif action == "add":
        inner[last], inner[rng.choice(["surprise", "class_path", "init_args", "config", "dict_kwargs"])] = old, value
    elif action == "move":
        target = rng.choice([path for path in key_paths(tree) if isinstance(get_node(tree, path), dict)])
        get_node(tree, target)[last] = old
    elif action == "type":
        inner[last] = rng.choice([[old], {"value": old}, str(old), [old, old], json.dumps(str(old))])
    return tree, f"{action} {description}"


@pytest.fixture(scope="module")
def every_key(sources, tmp_path_factory):
    """Return the paths of all keys for each recipe and engine."""
    import contextlib
    import io

    paths = {}
    for path in OFFLINE:
        for engine in ("torch", "jax"):
            recipe = tmp_path_factory.mktemp("whole") / "recipe.yaml"
            recipe.write_text(yaml.safe_dump({**shrink_recipe(path, sources, Path("x")), "engine": engine}))
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                assert main(["fit", "--config", str(recipe), "--print_config"]) == 0
            keys = key_paths(yaml.safe_load(out.getvalue()))
            paths[path.stem, engine] = [key for key in keys if not any(isinstance(part, int) for part in key)]
    return paths


def attempt(arguments: list[str], capfd) -> tuple[int | None, str]:
    """Run a command; return its status and how it violates the property, or an empty string."""
    capfd.readouterr()
    try:
        status = main(arguments)
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return None, f"{type(error).__name__}: {str(error)[:300]} at {frame.filename}:{frame.lineno}"
    output = capfd.readouterr()
    errors = [line for line in output.err.splitlines() if line.startswith("error: ")]
    if status not in (0, 2, 130):
        return status, f"status {status}"
    if "Traceback" in output.err + output.out:
        return status, output.err
    if status == 2 and (len(errors) != 1 or len(output.err.partition("error: ")[2]) < 13):
        return status, f"prints {output.err!r}"
    return status, ""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_mutated_recipe_runs_or_is_rejected_in_one_message(engine, sources, every_key, short_runs, settings_restored,
                                                          tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
    indices = iter(range(10**9))
    statuses, failures = [], []

    @settings(max_examples=NUM_MUTATIONS, derandomize=NUM_MUTATIONS == 20, deadline=None, database=None,
              phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(OFFLINE), st.integers(0, 2**32 - 1), st.sampled_from(["fit", "fit", "inspect", "predict"]))
    def check(path, seed, command):
        root = tmp_path / f"run{next(indices)}"
        tree = {**shrink_recipe(path, sources, root), "engine": engine}
        tree, description = mutate(tree, every_key[path.stem, engine], random.Random(seed))
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(tree, allow_unicode=True))
        short_runs()
        status, violation = attempt([command, "--config", str(recipe)], capfd)
        if not violation and status == 2 and root.exists() and not (root / "config.yaml").exists():
            violation = f"leaves {list(root.iterdir())}"
        statuses.append(status)
        if violation:
            failures.append(f"{command} {path.stem}: {description}: {violation}")

    check()
    assert not failures, f"{len(failures)} of {len(statuses)}:\n" + "\n".join(failures)
    assert {0, 2} <= set(statuses)  # some are rejected, some train


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_mutated_recipe_is_parsed_or_rejected_in_one_message(path, sources, settings_restored, tmp_path, monkeypatch,
                                                               capfd):
    """All shipped recipes, with `--print_config`."""
    monkeypatch.chdir(ROOT)
    rng = random.Random(path.stem)
    base = yaml.safe_load(path.read_text())
    failures = []
    for _ in range(max(NUM_MUTATIONS // 5, 2)):
        tree, description = mutate(base, key_paths(base), rng)
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(tree, allow_unicode=True))
        layers = ["--config", "configs/sft_qlora.yaml"] if path.stem == "smoke" else []
        _, violation = attempt(["fit", *layers, "--config", str(recipe), "--print_config"], capfd)
        failures += [f"{description}: {violation}"] if violation else []
    assert not failures, "\n".join(failures)
