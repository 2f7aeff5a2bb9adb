"""What a command imports, and that startup leaves the garbage collector on."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmmods.cli import enable_collector
from lmmods.data.sft import SFTData

ROOT = Path(__file__).parents[2]
WALK = """
import gc, json, runpy, sys
path, commands = sys.argv[1], json.loads(sys.argv[2])
seen = {}
for name, arguments in commands.items():
    sys.argv = ["train.py", *arguments]
    gc.unfreeze()
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as stop:
        seen[name] = {"status": stop.code, "modules": sorted(sys.modules), "enabled": gc.isenabled(),
                      "frozen": gc.get_freeze_count()}
open(path, "w").write(json.dumps(seen))
"""
FULL = {"model__init_args__quantize": None, "model__init_args__lora": None}
RECIPE = "--config configs/sft_qlora.yaml"
EARLY = {  # commands that need no libraries, with their exit status
    "--help": 0, "fit --help": 0, "inspect --engine jax --help": 0, "merge --help": 0, "evaluate --help": 0,
    "dashboard --help": 0, "report --help": 0, "find --help": 0, "sweep --help": 0, "migrate --help": 0,
    "chat --help": 0, "chat": 2, "chat --run none": 2,
    "fit --model.help SFT": 0, "fit --data.help=SFTData": 0, f"sweep {RECIPE} model.optimizer.lrr=1,2": 2,
    "fit --learning_rate 3": 2, "merge --rum x": 2, "fit --config none.yaml": 2,
    f"fit {RECIPE} --trainer.max_stepz 3": 2,
    f"fit {RECIPE} --model.lora.rank many": 2, f"fit {RECIPE} --trainer.devices 0": 2,
    f"inspect {RECIPE} --engine jax --data.batch_sise 3": 2, f"fit {RECIPE} --model.class_path SFTT": 2,
    f"fit {RECIPE} --trainer.logger WandbLoger": 2, f"fit {RECIPE} --trainer.callbacks Timer": 2,
    f"fit {RECIPE} --data.batch_size 0": 2, f"fit {RECIPE} --engine jax --checkpoint.keep_last 0": 2}


@pytest.fixture
def walk(recipe, shared):
    """A function that returns the modules and collector state of a train.py process after a command.

    One process runs several commands, those that import less first, so that no earlier command imports too much.
    """
    def fit(folder: Path, name: str, **changes) -> list[str]:
        return ["fit", *recipe(f"{name}.yaml", trainer__default_root_dir=str(folder / name), **changes)]

    packed = {"trainer__max_steps": 2, "data__init_args__packing": True}
    walks = {
        "early": lambda folder: {words: words.split() for words in EARLY},
        "torch": lambda folder: {"torch": fit(folder, "torch", **packed)},
        "jax": lambda folder: {"jax": fit(folder, "jax", engine="jax", **packed),
                               "jax full": fit(folder, "full", engine="jax", **FULL, trainer__max_steps=1)},
    }

    def run_walk(walk: str, name: str) -> dict:
        def fill(folder: Path) -> None:
            process = subprocess.run(
                [sys.executable, "-c", WALK, str(folder / "seen.json"), json.dumps(walks[walk](folder))], cwd=ROOT,
                capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
            (folder / "said.txt").write_text(process.stderr)
            assert process.returncode == 0, process.stderr

        folder = shared(f"walk-{walk}", fill)
        state = json.loads((folder / "seen.json").read_text())[name]
        assert state["status"] == EARLY.get(name, 0), (folder / "said.txt").read_text()
        return state

    return run_walk


def filter_packages(modules: list[str], *packages: str) -> list[str]:
    return [name for name in modules if any(name == package or name.startswith(f"{package}.") for package in packages)]


@pytest.mark.slow
def test_a_torch_run_imports_no_jax(walk):
    state = walk("torch", "torch")
    assert filter_packages(state["modules"], "lmmods.torch_engine.tasks.sft", "peft", "bitsandbytes")  # QLoRA
    assert not filter_packages(state["modules"], "jax", "jaxlib", "flax", "optax", "orbax", "jax_engine")
    assert state["enabled"] and state["frozen"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jax", "jax full"])
def test_a_jax_run_imports_no_torch_model(walk, name):
    state = walk("jax", name)
    assert filter_packages(state["modules"], "jax_engine.tasks.sft", "jax_engine.models.quant")
    assert not filter_packages(state["modules"], "peft", "bitsandbytes", "lmmods.torch_engine",
                               "transformers.modeling_utils")
    networks = [name for name in state["modules"]
                if name.startswith("transformers.models.") and name.rsplit(".", 1)[-1].startswith("modeling_")]
    assert networks in ([], ["transformers.models.auto.modeling_auto"])  # which only lists names
    assert state["enabled"] and state["frozen"]


@pytest.mark.parametrize("words", EARLY)
def test_help_and_errors_import_no_library(walk, words):
    state = walk("early", words)
    assert not filter_packages(state["modules"], "torch", "lightning", "transformers", "jax", "flax", "pandas",
                               "datasets", "peft", "bitsandbytes", "wandb", "lm_eval")
    assert state["enabled"]


def test_a_store_opens_without_importing_pandas(instructions, llama_folder, tmp_path):
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


def test_a_running_collector_is_left_alone():
    frozen = gc.get_freeze_count()
    enable_collector()
    assert gc.isenabled() and gc.get_freeze_count() <= frozen  # frozen objects may be freed


def test_the_collector_is_enabled_again_and_existing_objects_are_frozen():
    objects, frozen = [[] for _ in range(1000)], gc.get_freeze_count()
    gc.disable()
    try:
        enable_collector()
        assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(objects)
    finally:
        gc.enable()
