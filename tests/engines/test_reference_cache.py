"""`model.reference: cache`: reference log-probabilities, computed once for both engines."""

import json
import shutil

import numpy as np
import pytest

from lmmods.cli import main
from lmmods.core.settings import LoRA
from lmmods.data.preference import PreferenceData
from lmmods.data.references import reference_store
from lmmods.data.store.references import ReferenceStore
from lmmods.recipe.tasks.preference import PreferenceFields
from lmmods.runs.folder import RunFolder
from lmmods.runs.model_card import describe_initial_weights
from tests.finished_runs import rows

FULL = {"model__init_args__quantize": None, "model__init_args__lora": None}


@pytest.fixture
def arguments(recipe, pairs, tmp_path, monkeypatch):
    def write(name, **changes):
        written = recipe(f"{name}.yaml", **{
            "model__class_path": "Preference", "data__class_path": "PreferenceData", "data__init_args__source": pairs,
            "data__init_args__val_size": 2, "data__init_args__batch_size": 3, "trainer__max_steps": 4,
            "trainer__val_check_interval": 2, "trainer__default_root_dir": str(tmp_path / name),
            "model__init_args__optimizer": {"lr": 0.001}, **FULL, **changes})
        monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))
        return written

    return write


@pytest.fixture
def fit(arguments, tmp_path):
    def run(name, *options, **changes):
        assert main(["fit", *arguments(name, **changes), *options]) == 0
        return RunFolder(tmp_path / name)

    return run


@pytest.fixture
def forbid_computing(monkeypatch):
    """Return a function after whose call computing reference log-probabilities fails."""
    def forbid():
        for module in ("lmmods.torch_engine.nn.reference", "jax_engine.tasks.preference"):
            monkeypatch.setattr(f"{module}._compute", None)

    return forbid


def select_losses(row):
    return {key: value for key, value in row.items() if key.endswith("loss")}


CACHE = {"model__init_args__reference": "cache"}


@pytest.mark.parametrize(("engine", "reader", "loss"), [
    ("torch", "torch", "sigmoid"), pytest.param("torch", "jax", "kto", marks=pytest.mark.slow),
    pytest.param("jax", "torch", "sigmoid", marks=pytest.mark.slow)])
def test_a_cached_reference_equals_the_live_one_and_serves_both_engines(fit, forbid_computing, capsys, engine, reader,
                                                                        loss):
    changes = {"model__init_args__loss": loss, "trainer__accumulate_grad_batches": 2}
    live = rows(fit("live", engine=engine, **changes))
    cached = rows(fit("cached", engine=engine, **changes, **CACHE))
    assert capsys.readouterr().out.count("rows (train) under the reference") == 1
    assert len(live) == 4 and "val/loss" in live[-1]
    for one, other in zip(live, cached, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-4)
        assert select_losses(one) == pytest.approx(select_losses(other), rel=1e-6, abs=1e-6)
    forbid_computing()
    for one, other in zip(cached, rows(fit("other", engine=reader, **changes, **CACHE)), strict=True):
        assert select_losses(one) == pytest.approx(select_losses(other), rel=1e-4, abs=1e-5)


def test_a_cached_reference_is_not_supported_with_streaming(arguments, capsys):
    assert main(["fit", *arguments("stream", data__init_args__streaming=True, data__init_args__val_size=0,
                                   **CACHE)]) == 2
    assert "model.reference cache reads all rows before training" in capsys.readouterr().err


# What the cache depends on ------------------------------------------------------------------------------------------


def test_other_rows_templates_and_lengths_get_their_own_cache(pairs, llama_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))

    def folder(network="one", answers="pair", seed=7, **settings):
        data = PreferenceData(source=pairs, **{"template": "alpaca", "max_length": 200, "val_size": 2, **settings})
        data.connect(pretrained=str(llama_folder), seed=seed, answers=answers)
        data.prepare_data()
        data.setup("fit")
        return reference_store(data, "train", {"weights": network}).folder

    assert folder() == folder(batch_size=5, shuffle=False, num_workers=2)
    different = [folder(), folder("two"), folder(template="vicuna"), folder(max_length=150), folder(val_size=3),
                 folder(answers="single"), folder(answers="mismatched"), folder(answers="mismatched", val_size=0),
                 folder(answers="mismatched", val_size=0, seed=8)]
    assert len({*different}) == len(different)


def test_other_initial_weights_get_their_own_cache(llama_folder, tmp_path):
    def facts(folder, precision="32-true", seed=7, **fields):
        return json.dumps(describe_initial_weights(PreferenceFields(pretrained=str(folder), **fields), precision, seed))

    moved = shutil.copytree(llama_folder, tmp_path / "moved")
    assert facts(moved) == facts(llama_folder, loss="ipo", beta=0.3, reference="cache")
    lora = {"lora": LoRA(rank=4)}
    assert facts(moved, **lora) == facts(moved, lora=LoRA(rank=8))  # LoRA does not change the initial outputs
    pissa = [facts(moved, lora=LoRA(rank=rank, init="pissa")) for rank in (4, 8)]
    different = [*pissa, facts(moved), facts(moved, "bf16-mixed"), facts(moved, seed=8), facts(moved, **lora),
                 facts(moved, quantize="nf4", **lora), facts(moved, config_overrides={"rms_norm_eps": 1e-3})]
    weights = moved / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    different.append(facts(moved))
    assert len({*different}) == len(different)


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / "logps.npy").write_bytes((folder / "logps.npy").read_bytes()[:-4]),
    lambda folder: (folder / "manifest.json").unlink(),
    lambda folder: (folder / "logps.npy").unlink(),
], ids=["truncated", "no manifest", "no log-probabilities"])
def test_a_damaged_cache_is_reported_and_deleted(tmp_path, capsys, damage):
    store = ReferenceStore(tmp_path / "new" / "reference-1", (3, 2))
    assert store.read() is None
    logps = np.arange(6, dtype=np.float32).reshape(3, 2)
    store.write(logps)
    store.write(logps + 1)  # another process was faster
    assert (store.read() == logps).all() and [*store.folder.parent.iterdir()] == [store.folder]
    damage(store.folder)
    assert store.read() is None and "are damaged" in capsys.readouterr().err and not store.folder.exists()
