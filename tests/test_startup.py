"""What a command imports, and that the door leaves the garbage collector on."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmmods.cli import enable_collector
from lmmods.data.sft import SFTData

ROOT = Path(__file__).parent.parent
DOOR = """
import gc, json, runpy, sys
path, *sys.argv[1:] = sys.argv[1:]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as stop:
    seen = {"status": stop.code, "modules": sorted(sys.modules), "enabled": gc.isenabled(),
            "frozen": gc.get_freeze_count()}
    open(path, "w").write(json.dumps(seen))
"""


def walk_in(tmp_path: Path, *arguments: str) -> dict:
    """What a process of train.py with these arguments has seen when it ends."""
    path = tmp_path / "seen.json"
    process = subprocess.run([sys.executable, "-c", DOOR, str(path), *arguments], cwd=ROOT, capture_output=True,
                             text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert path.exists(), process.stderr
    seen = json.loads(path.read_text())
    assert seen["status"] == 0, process.stderr
    return seen


def of_packages(modules: list[str], *packages: str) -> list[str]:
    return [name for name in modules if any(name == each or name.startswith(f"{each}.") for each in packages)]


@pytest.mark.slow
def test_a_torch_run_imports_no_jax(recipe, tmp_path):
    seen = walk_in(tmp_path, "fit", *recipe(trainer__max_steps=2, data__init_args__packing=True))
    assert of_packages(seen["modules"], "lmmods.torch_engine.tasks.sft", "peft", "bitsandbytes")  # it was QLoRA
    assert not of_packages(seen["modules"], "jax", "jaxlib", "flax", "optax", "orbax", "jax_engine")
    assert seen["enabled"] and seen["frozen"]


@pytest.mark.slow
def test_a_jax_run_imports_no_network_of_torch(recipe, tmp_path):
    seen = walk_in(tmp_path, "fit", "--engine", "jax", *recipe(trainer__max_steps=2, data__init_args__packing=True))
    assert of_packages(seen["modules"], "jax_engine.tasks.sft", "jax_engine.models.quant")
    assert not of_packages(seen["modules"], "peft", "bitsandbytes", "lmmods.torch_engine",
                           "transformers.modeling_utils")
    networks = [name for name in seen["modules"]
                if name.startswith("transformers.models.") and name.rsplit(".", 1)[-1].startswith("modeling_")]
    assert networks in ([], ["transformers.models.auto.modeling_auto"])  # that one is a list of names
    assert seen["enabled"] and seen["frozen"]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("merge", "--help"), ("dashboard", "--help"), ("--help",)], ids=" ".join)
def test_no_command_imports_what_only_runs_need(arguments, tmp_path):
    seen = walk_in(tmp_path, *arguments)
    assert not of_packages(seen["modules"], "jax", "flax", "peft", "bitsandbytes", "wandb", "datasets", "pandas",
                           "lm_eval", "transformers.modeling_utils")
    assert seen["enabled"]


def test_a_report_needs_no_library(tmp_path):
    seen = walk_in(tmp_path, "report", "--help")
    assert not of_packages(seen["modules"], "torch", "lightning", "transformers", "jax", "pandas")
    assert seen["enabled"]


def test_a_store_opens_without_pandas(instructions, llama_folder, tmp_path):
    data = SFTData(str(instructions), tokenizer=str(llama_folder), template="alpaca", max_length=256,
                   cache_dir=str(tmp_path))
    data.setup("fit")
    code = f"""
import sys
from pathlib import Path
from lmmods.data.store.arrow_store import Store
store = Store(next(Path({str(tmp_path)!r}).glob("sftdata-*")))
assert store.row(3)["input_ids"].size and store.column("input_ids").all() and store.column("index")[3] == 3
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_the_collector_is_left_alone_where_it_is_on():
    frozen = gc.get_freeze_count()
    enable_collector()
    assert gc.isenabled() and gc.get_freeze_count() == frozen


def test_the_collector_comes_on_again_and_spares_what_is_there():
    gc.disable()
    try:
        enable_collector()
        assert gc.isenabled() and gc.get_freeze_count()
    finally:
        gc.enable()
        gc.unfreeze()
