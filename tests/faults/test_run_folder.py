"""Nothing of the user's is deleted: what no run wrote stays, whatever it is called and wherever links lead."""

import json
import shutil
from pathlib import Path

import pytest

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.runs.checkpoint_files import remove_checkpoint
from lmmods.runs.checkpoint_format import write_manifest
from lmmods.runs.folder import RunFolder, continued, write_json, write_text
from lmmods.runs.recognition import wandb_paths
from lmmods.runs.run_files import LIST, NAMES, RunFiles

ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])
PLAIN = {"model__init_args__quantize": None, "model__init_args__lora": {"rank": 2}, "trainer__max_steps": 2,
         "trainer__limit_val_batches": 0}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def add_checkpoint(run: RunFolder, name: str) -> None:
    write_text(run.checkpoint(name) / "state.json", "{}")
    write_manifest(run.checkpoint(name))


def add_model(run: RunFolder, *names: str) -> None:
    exported = run.room_for_model()
    for name in names:
        (exported / name).write_text("exported")
    run.put_model(exported)


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


# Fresh runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_something_else_has_is_refused(run, name, overwrite):
    path = run.root / name / "mine" if "." not in name[1:] and name != "completed" else run.root / name
    write_text(path, "mine")
    before = tree(run.root)
    with pytest.raises(UserError, match=f"holds {name}, which no run wrote"):
        run.check_can_start(overwrite)
    assert tree(run.root) == before


def test_auto_begins_a_run_or_goes_on(run):
    """The same command at each start, whenever the one before died; what is finished without a checkpoint stays."""
    assert continued(run, "auto") is None
    run.check_fit("auto", False, {})
    run.begin(None)
    write_text(run.config, "{}")  # killed before its first checkpoint
    run.check_fit("auto", False, {})
    run.complete()
    with pytest.raises(UserError, match="holds a finished run"):
        run.check_fit("auto", False, {})
    add_checkpoint(run, "step=2")
    run.check_fit("auto", False, {})
    assert continued(run, "auto") == run.checkpoint("step=2")
    with pytest.raises(UserError, match="no such checkpoint"):
        run.resolve("auto")


def test_empty_folders_are_room(run, tmp_path):
    (tmp_path / "disk").mkdir()
    run.root.mkdir()
    run.model.mkdir()
    run.checkpoints.symlink_to(tmp_path / "disk")
    run.check_can_start(overwrite=False)


@ENGINES
def test_the_model_that_is_trained_is_not_deleted(recipe, run, llama_folder, engine, capfd):
    shutil.copytree(llama_folder, run.model)
    before = {name: (run.model / name).read_bytes() for name in tree_names(run.model)}
    arguments = recipe(engine=engine, **PLAIN, model__init_args__pretrained=str(run.model))
    for extra in ([], ["--overwrite", "true"]):
        assert main(["fit", *arguments, *extra]) == 2
        assert "model.pretrained is" in capfd.readouterr().err
    assert {name: (run.model / name).read_bytes() for name in tree_names(run.model)} == before


def tree_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("key", "value"), [
    ("adapter", "{}/model"), ("pretrained", "{}/checkpoints/step=2")])
def test_what_a_recipe_reads_is_not_what_its_run_writes(run, key, value):
    add_model(run, "config.json")
    add_checkpoint(run, "step=2")
    recipe = {"model": {"init_args": {key: value.format(run.root)}}, "data": {"init_args": {}}}
    with pytest.raises(UserError, match=f"model.{key} is"):
        run.check_fit(None, True, recipe)


def test_rows_that_predict_would_replace_are_refused(run):
    write_text(run.predictions, "{}")
    recipe = {"data": {"init_args": {"predict_source": [{"path": str(run.root / "*.jsonl")}, str(run.predictions)]}}}
    with pytest.raises(UserError, match="data.predict_source is"):
        run.check_results(recipe)


# Starting again --------------------------------------------------------------------------------------------------


def test_overwrite_deletes_what_runs_wrote_and_nothing_else(run, capfd):
    run.begin(None)
    write_text(run.config, "a: 1\n")
    add_checkpoint(run, "step=2")
    run.point("last", run.checkpoint("step=2"))
    add_model(run, "config.json")
    mine = ["notes.txt", "model/model.gguf", "checkpoints/step=2/notes.txt", "checkpoints/step=abc/x", ".hidden"]
    for name in mine:
        write_text(run.root / name, "mine")
    run.check_can_start(overwrite=True)
    run.begin(None)
    assert set(tree(run.root)) == {*mine, LIST}
    assert f"Left where they are, as no run wrote them: {run.checkpoints / 'step=2'}" in capfd.readouterr().out
    run.check_can_start(overwrite=True)  # its own folders, whatever lies in them
    add_model(run, "config.json")
    assert set(tree(run.model)) == {"config.json", "model.gguf"}


def test_overwrite_deletes_a_run_of_wandb_with_its_links(run):
    run.begin(None)
    recipe = {"trainer": {"logger": [{"class_path": "WandbLogger", "init_args": {"id": "a1"}}]}}
    run.files.claim(*wandb_paths(recipe, run.root))
    write_text(run.root / "wandb/offline-run-a1/logs/debug.log", "")
    for name, leads_to in (("latest-run", "offline-run-a1"), ("debug.log", "offline-run-a1/logs/debug.log")):
        (run.root / "wandb" / name).symlink_to(leads_to)
    run.check_can_start(overwrite=True)
    run.begin(None)
    assert not (run.root / "wandb").exists()


def test_exporting_again_keeps_files_of_others(run):
    add_model(run, "config.json", "old.json")
    write_text(run.model / "mine.txt", "mine")
    add_model(run, "config.json", "new.json")
    assert set(tree(run.model)) == {"config.json", "new.json", "mine.txt"}
    with pytest.raises(UserError, match="mine.txt was written by no run"):
        add_model(run, "mine.txt")
    assert (run.model / "mine.txt").read_text() == "mine"


def test_links_stay_and_nothing_of_others_behind_them_goes(run, tmp_path):
    run.begin(None)
    for folder in (run.checkpoints, run.model):
        (tmp_path / "disk" / folder.name).mkdir(parents=True)
        folder.symlink_to(tmp_path / "disk" / folder.name)
    add_checkpoint(run, "step=2")
    add_model(run, "config.json")
    for folder in (run.checkpoints, run.model):
        write_text(folder / "mine", "mine")
    run.check_can_start(overwrite=True)
    run.begin(None)
    assert tree(tmp_path / "disk") == {"checkpoints/mine": "mine", "model/mine": "mine"}
    assert run.checkpoints.is_symlink() and run.model.is_symlink()


def test_dropping_a_checkpoint_keeps_files_and_links_of_others(run, tmp_path):
    for name in ("step=1", "step=2"):
        add_checkpoint(run, name)
    write_text(run.checkpoint("step=2") / "mine", "mine")
    shutil.move(run.checkpoint("step=1"), tmp_path / "elsewhere")
    run.checkpoint("step=1").symlink_to(tmp_path / "elsewhere")
    for name in ("step=1", "step=2"):
        remove_checkpoint(run.checkpoint(name))
    assert tree(run.checkpoint("step=2")) == {"mine": "mine"}
    assert (tmp_path / "elsewhere" / "state.json").exists() and run.checkpoint("step=1").is_symlink()


def test_a_name_is_noted_before_it_is_written(run, monkeypatch):
    """A kill between the two leaves nothing that nobody owns."""
    run.root.mkdir()
    monkeypatch.setattr("lmmods.runs.folder.write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.write_files({"predictions.json": {}})
    assert "predictions.json" in RunFiles(run.root).entries()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"paths": 3}', '{"paths": ["../x"]}', '{"paths": ["/x"]}'])
def test_a_damaged_list_is_named(run, text):
    write_text(run.root / LIST, text)
    with pytest.raises(UserError, match="run-files.json is damaged"):
        run.check_can_start(overwrite=True)


# Runs of the version before --------------------------------------------------------------------------------------


@pytest.mark.slow
@ENGINES
def test_a_run_without_a_list_resumes_and_is_overwritten(recipe, run, engine):
    arguments = recipe(engine=engine, **PLAIN)
    assert main(["fit", *arguments]) == 0
    (run.root / LIST).unlink()
    write_text(run.model / "mine.txt", "mine")
    assert main(["fit", *arguments]) == 2
    longer = recipe("longer.yaml", engine=engine, **{**PLAIN, "trainer__max_steps": 3})
    assert main(["fit", *longer, "--ckpt_path", "last"]) == 0
    (run.root / LIST).unlink()
    assert main(["fit", *arguments, "--overwrite", "true"]) == 0
    assert run.names() == ["step=2"] and (run.model / "mine.txt").exists()


def test_the_users_model_in_an_unfinished_run_without_a_list(run):
    add_checkpoint(run, "step=2")
    write_json(run.metrics_json, {})
    write_text(run.model / "config.json", json.dumps({"mine": True}))
    with pytest.raises(UserError, match="holds model, which no run wrote"):
        run.check_can_resume(run.checkpoint("step=2"), overwrite=False)
