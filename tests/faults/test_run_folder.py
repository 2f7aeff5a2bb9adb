"""No file of the user is deleted: what no run wrote stays, whatever its name and wherever links lead."""

import json
import os
import shutil
from pathlib import Path

import pytest

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.runs.checkpoint import WriterRank, create_folder, write_checkpoint, write_manifest, write_shards
from lmmods.runs.csv_logger import MetricsCSV
from lmmods.runs.folder import RunFolder, find_checkpoint_to_resume, write_json, write_text
from lmmods.runs.lock import FILE as LOCK
from lmmods.runs.loggers import logger_paths
from lmmods.runs.run_files import LIST, MAY_BE_LINKS, NAMES, OWNER, RunFiles, append_json, remove_checkpoint

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
    exported = run.create_model_folder()
    for name in names:
        (exported / name).write_text("exported")
    run.replace_model(exported)


def read_tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text("latin-1") for path in folder.rglob("*") if path.is_file()}


# Fresh runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_rejects_a_name_taken_by_a_foreign_file(run, name, overwrite):
    path = run.root / name / "mine" if "." not in name[1:] and name != "completed" else run.root / name
    write_text(path, "mine")
    before = read_tree(run.root)
    with pytest.raises(UserError, match=f"contains {name}, which no run wrote"):
        run.check_can_start(overwrite)
    assert read_tree(run.root) == before


def test_ckpt_path_auto_starts_or_resumes_a_run(run):
    """Whenever the previous run was killed. A finished run without checkpoints is not overwritten."""
    assert find_checkpoint_to_resume(run, "auto") is None
    run.check_fit("auto", False, {})
    run.begin(None)
    write_text(run.config, "{}")  # killed before its first checkpoint
    run.check_fit("auto", False, {})
    run.complete()
    with pytest.raises(UserError, match="contains a finished run"):
        run.check_fit("auto", False, {})
    add_checkpoint(run, "step=2")
    run.check_fit("auto", False, {})
    assert find_checkpoint_to_resume(run, "auto") == run.checkpoint("step=2")
    with pytest.raises(UserError, match="does not exist"):
        run.resolve("auto")


def link_to_disk(run: RunFolder, name: str, disk: Path) -> None:
    """Make a link as a user does, to a folder with an owner file."""
    (disk / name).mkdir(parents=True)
    write_text(disk / name / OWNER, f"{run.root}\n")
    (run.root / name).symlink_to(disk / name)


def test_a_run_may_start_in_empty_and_linked_folders(run, tmp_path):
    run.model.mkdir(parents=True)
    link_to_disk(run, "checkpoints", tmp_path / "disk")
    with run.lock("fit", lambda: run.check_can_start(overwrite=False)):
        run.begin(None)


@ENGINES
def test_a_model_in_the_run_folder_is_not_overwritten_by_its_own_training(recipe, run, llama_folder, engine, capfd):
    shutil.copytree(llama_folder, run.model)
    before = {name: (run.model / name).read_bytes() for name in list_names(run.model)}
    arguments = recipe(engine=engine, **PLAIN, model__init_args__pretrained=str(run.model))
    for extra in ([], ["--overwrite", "true"]):
        assert main(["fit", *arguments, *extra]) == 2
        assert "model.pretrained is" in capfd.readouterr().err
    assert {name: (run.model / name).read_bytes() for name in list_names(run.model)} == before


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("key", "value"), [
    ("adapter", "{}/model"), ("pretrained", "{}/checkpoints/step=2")])
def test_a_recipe_may_not_read_what_its_run_overwrites(run, key, value):
    add_model(run, "config.json")
    add_checkpoint(run, "step=2")
    recipe = {"model": {"init_args": {key: value.format(run.root)}}, "data": {"init_args": {}}}
    with pytest.raises(UserError, match=f"model.{key} is"):
        run.check_fit(None, True, recipe)


def test_predict_may_not_read_the_file_that_it_overwrites(run):
    write_text(run.predictions, "{}")
    recipe = {"data": {"init_args": {"predict_source": [{"path": str(run.root / "*.jsonl")}, str(run.predictions)]}}}
    with pytest.raises(UserError, match="data.predict_source is"):
        run.check_results(recipe)


# Starting again --------------------------------------------------------------------------------------------------


def test_overwrite_deletes_only_what_runs_wrote(run, capfd):
    run.begin(None)
    write_text(run.config, "a: 1\n")
    add_checkpoint(run, "step=2")
    run.point("last", run.checkpoint("step=2"))
    add_model(run, "config.json")
    user_files = ["notes.txt", "model/model.gguf", "checkpoints/step=2/notes.txt", "checkpoints/step=abc/x", ".hidden"]
    for name in user_files:
        write_text(run.root / name, "mine")
    run.check_can_start(overwrite=True)
    run.begin(None)
    assert set(read_tree(run.root)) == {*user_files, LIST}
    assert f"Kept, because no run wrote them: {run.checkpoints / 'step=2'}" in capfd.readouterr().out
    run.check_can_start(overwrite=True)  # its own folders, whatever they contain
    add_model(run, "config.json")
    assert set(read_tree(run.model)) == {"config.json", "model.gguf"}


def test_overwrite_deletes_a_wandb_run_with_its_links(run):
    run.begin(None)
    recipe = {"trainer": {"logger": [{"class_path": "WandbLogger", "init_args": {"id": "a1"}}]}}
    run.files.claim(*logger_paths(recipe, run.root))
    write_text(run.root / "wandb/offline-run-a1/logs/debug.log", "")
    for name, target in (("latest-run", "offline-run-a1"), ("debug.log", "offline-run-a1/logs/debug.log")):
        (run.root / "wandb" / name).symlink_to(target)
    run.check_can_start(overwrite=True)
    run.begin(None)
    assert not (run.root / "wandb").exists()


def test_a_second_export_keeps_foreign_files(run):
    add_model(run, "config.json", "old.json")
    write_text(run.model / "mine.txt", "mine")
    add_model(run, "config.json", "new.json")
    assert set(read_tree(run.model)) == {"config.json", "new.json", "mine.txt"}
    with pytest.raises(UserError, match="mine.txt was not written by a run"):
        add_model(run, "mine.txt")
    assert (run.model / "mine.txt").read_text() == "mine"


def test_overwrite_keeps_links_and_foreign_files_behind_them(run, tmp_path):
    run.begin(None)
    for name in ("checkpoints", "model"):
        link_to_disk(run, name, tmp_path / "disk")
    add_checkpoint(run, "step=2")
    add_model(run, "config.json")
    for folder in (run.checkpoints, run.model):
        write_text(folder / "mine", "mine")
    with run.lock("fit", lambda: run.check_can_start(overwrite=True)):
        run.begin(None)
    owner = f"{run.root}\n"
    assert read_tree(tmp_path / "disk") == {"checkpoints/mine": "mine", "model/mine": "mine",
                                            f"checkpoints/{OWNER}": owner, f"model/{OWNER}": owner}
    assert run.checkpoints.is_symlink() and run.model.is_symlink()


def test_deleting_a_checkpoint_keeps_foreign_files_and_links(run, tmp_path):
    for name in ("step=1", "step=2"):
        add_checkpoint(run, name)
    write_text(run.checkpoint("step=2") / "mine", "mine")
    shutil.move(run.checkpoint("step=1"), tmp_path / "elsewhere")
    run.checkpoint("step=1").symlink_to(tmp_path / "elsewhere")
    for name in ("step=1", "step=2"):
        remove_checkpoint(run.checkpoint(name))
    assert read_tree(run.checkpoint("step=2")) == {"mine": "mine"}
    assert (tmp_path / "elsewhere" / "state.json").exists() and run.checkpoint("step=1").is_symlink()


def test_a_file_is_listed_before_it_is_written(run, monkeypatch):
    """So a kill in between leaves no unlisted file."""
    run.root.mkdir()
    monkeypatch.setattr("lmmods.runs.folder.write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.write_files({"predictions.json": {}})
    assert "predictions.json" in RunFiles(run.root).entries()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"paths": 3}', '{"paths": ["../x"]}', '{"paths": ["/x"]}'])
def test_a_damaged_list_of_files_is_an_error(run, text):
    write_text(run.root / LIST, text)
    with pytest.raises(UserError, match="run-files.json is damaged"):
        run.check_can_start(overwrite=True)


# Runs without a list of files -------------------------------------------------------------------------------------


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


def test_a_foreign_model_in_a_run_without_a_list_stops_the_resume(run):
    add_checkpoint(run, "step=2")
    write_json(run.metrics_json, {})
    write_text(run.model / "config.json", json.dumps({"mine": True}))
    with pytest.raises(UserError, match="contains model, which no run wrote"):
        run.check_can_resume(run.checkpoint("step=2"), overwrite=False)


# Untrusted run folders: nothing outside is deleted or written --------------------------------------------------------


@pytest.fixture
def thesis(tmp_path) -> Path:
    """Return a folder of the user next to the run folder."""
    for name in ("thesis.tex", "figures/one.png", "checkpoint/state.json", "checkpoint/notes"):
        write_text(tmp_path / "thesis" / name, "mine")
    write_manifest(tmp_path / "thesis" / "checkpoint")
    return tmp_path / "thesis"


@pytest.mark.parametrize("name", ["{}/thesis.tex", "../../../thesis/thesis.tex", "figures/../thesis.tex", ".."])
def test_a_manifest_that_names_files_outside_deletes_nothing(run, thesis, name):
    run.files.claim("checkpoints")
    for step in ("step=1", "step=2"):
        add_checkpoint(run, step)
        write_json(run.checkpoint(step) / "manifest.json", {"state.json": [2, 0], name.format(thesis): [4, 0]})
        write_text(run.checkpoint(step) / "mine", "mine")
    before = read_tree(thesis)
    remove_checkpoint(run.checkpoint("step=1"))
    run.files.delete()
    assert read_tree(thesis) == before and run.names() == ["step=1", "step=2"]


def test_a_folder_named_by_a_manifest_is_not_deleted(run):
    add_checkpoint(run, "step=1")
    write_json(run.checkpoint("step=1") / "manifest.json", {"state.json": [2, 0], "mine": [4, 0]})
    write_text(run.checkpoint("step=1") / "mine" / "notes", "mine")
    remove_checkpoint(run.checkpoint("step=1"))
    assert read_tree(run.checkpoint("step=1")) == {"mine/notes": "mine"}


@pytest.mark.parametrize("path", ["thesis.tex", "wandb/a/b", "wandb/..", "model/../thesis.tex", "/thesis.tex",
                                  "checkpoints/thesis.tex", "model/", ""])
def test_a_list_with_names_that_no_run_writes_is_an_error(run, path):
    write_text(run.root / "thesis.tex", "mine")
    write_json(run.root / LIST, {"paths": [path]})
    with pytest.raises(UserError, match="run-files.json is damaged .no run writes"):
        run.check_can_start(overwrite=True)


@pytest.mark.parametrize("path", ["model/config.json", "wandb/run-1", "checkpoints", "rollouts"])
def test_the_list_rejects_paths_through_foreign_links(run, thesis, path):
    """The list itself checks, whether or not the start of a run did."""
    run.root.mkdir()
    (run.root / path.partition("/")[0]).symlink_to(thesis / "checkpoint")
    before = read_tree(thesis)
    for change in (run.files.claim, run.files.drop):
        with pytest.raises(UserError, match="is a link"):
            change(path)
    assert read_tree(thesis) == before and not (run.root / LIST).exists()


def test_an_export_follows_no_link_out_of_the_model_folder(run, thesis):
    """Neither a file of an earlier export nor a folder of a new one."""
    run.begin(None)
    write_text(run.model / "mine", "mine")
    (run.model / "figures").symlink_to(thesis / "figures")
    (run.model / "config.json").symlink_to(thesis / "thesis.tex")
    write_json(run.root / LIST, {"paths": ["model", "model/config.json", "model/figures/one.png"]})
    before = read_tree(thesis)
    with pytest.raises(UserError, match="leads out of this folder"):
        add_model(run, "config.json")
    assert (run.model / "config.json").read_text() == "exported"
    exported = run.create_model_folder()
    write_text(exported / "figures" / "one.png", "exported")
    with pytest.raises(UserError, match="leads out of this folder"):
        run.replace_model(exported)
    with pytest.raises(UserError, match="leads out of this folder"):
        run.files.delete()
    assert read_tree(thesis) == before


def test_links_at_temporary_names_are_replaced_not_followed(run, thesis):
    """All temporary names of a run are links before it starts."""
    for step in ("step=1", "step=2"):
        add_checkpoint(run, step)
    before = read_tree(thesis)
    for name in (".step=3", ".dropped-step=1", ".replaced-step=2", f".last-{os.getpid()}"):
        (run.checkpoints / name).symlink_to(thesis / "checkpoint")
    with run.lock("fit"):
        run.begin(run.checkpoint("step=2"))
    (run.checkpoints / ".step=3").symlink_to(thesis / "checkpoint")
    (run.checkpoints / "step=3").symlink_to(thesis / "checkpoint")
    for write in (lambda folder: write_checkpoint(folder, {"epoch": 1}),
                  lambda folder: (create_folder(folder),
                                  write_shards(folder, {"epoch": 1}, WriterRank(0, 1)))):
        write(run.checkpoint("step=3"))
        run.point("last", run.checkpoint("step=3"))
    (run.checkpoints / ".dropped-step=1").symlink_to(thesis / "checkpoint")
    remove_checkpoint(run.checkpoint("step=1"))
    assert read_tree(thesis) == before
    assert {path.name for path in run.checkpoints.iterdir()} == {"step=2", "step=3", "last"}


def test_links_at_names_of_run_files_are_replaced_not_followed(run, thesis):
    """Links that appear during a run; its start rejects existing ones."""
    run.begin(None)
    before = read_tree(thesis)
    write_text(run.model / "loss.png", "curves")
    (run.root / "metrics.csv").write_text("no table\n")
    (run.root / "metrics.csv.damaged").symlink_to(thesis / "thesis.tex")
    for name in ("metrics.json", "resumes.jsonl", "loss.png", "completed", "config.yaml", "data_report.json"):
        (run.root / name).symlink_to(thesis / "thesis.tex")
    write_json(run.root / LIST, {"paths": [*NAMES]})
    MetricsCSV(run.metrics_csv).rewind(3)
    append_json(run.resumes, {"step": 1})
    run.write_start({"trainer": {}}, {})
    run.merge_metrics({"val/loss": 1.0})
    run.complete()
    assert read_tree(thesis) == before and not any(path.is_symlink() for path in run.root.iterdir())
    (run.root / "metrics.csv").unlink()
    (run.root / "metrics.csv").symlink_to(thesis / "thesis.tex")
    logger = MetricsCSV(run.metrics_csv)
    with pytest.raises(OSError, match="symbolic links"):
        for step in (1, 2):
            logger.log_metrics({}, step=step)
    assert read_tree(thesis) == before


LINKED = [*NAMES, LIST, LOCK, ".replaced-model"]


@ENGINES
def test_a_run_rejects_links_at_the_names_that_it_writes(finished, recipe, thesis, engine, capfd):
    """Each name that a run writes is a link to a file, a folder or nothing; when resuming and when overwriting."""
    run = finished("run", **PLAIN, engine=engine)
    arguments = recipe(engine=engine, **{**PLAIN, "trainer__max_steps": 4})
    before, original = read_tree(thesis), run.root.with_name("kept")
    for index, name in enumerate(LINKED):
        path = run.root / name
        target = thesis / ("figures" if name in MAY_BE_LINKS else ("figures", "thesis.tex", "nothing")[index % 3])
        if path.exists():
            path.rename(original)
        path.symlink_to(target)
        for extra in (["--ckpt_path", "last"], ["--overwrite", "true"])[index % 2:]:
            capfd.readouterr()
            assert main(["fit", *arguments, *extra]) == 2, name
            error = capfd.readouterr().err
            assert error.startswith("error: ") and f"{path} is a link" in error, (name, error)
        path.unlink()
        if original.exists():
            original.rename(path)
    assert read_tree(thesis) == before


@pytest.mark.slow
@ENGINES
def test_deleting_untrusted_checkpoints_deletes_no_user_file(finished, recipe, thesis, engine):
    run = finished("run", **PLAIN, engine=engine, checkpoint={"every_n_steps": 1, "keep_last": 2})
    for name in run.names():
        path = run.checkpoint(name) / "manifest.json"
        manifest = json.loads(path.read_text())
        write_json(path, {**manifest, str(thesis / "thesis.tex"): [4, 0]} if name == "step=1" else manifest)
    before = read_tree(thesis)
    arguments = recipe(engine=engine, **{**PLAIN, "trainer__max_steps": 4, "checkpoint": {"keep_last": 1}})
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert main(["fit", *arguments, "--overwrite", "true"]) == 0
    assert read_tree(thesis) == before and "step=1" in run.names()


@pytest.mark.slow
@ENGINES
def test_a_run_writes_through_links_that_the_user_owns(recipe, run, tmp_path, engine, capfd):
    """The user linked both folders with owner files: the run uses them, and a copy of the run folder does not."""
    run.root.mkdir()
    for name in ("checkpoints", "model"):
        link_to_disk(run, name, tmp_path / "disk")
    arguments = recipe(engine=engine, **PLAIN)
    assert main(["fit", *arguments]) == 0
    longer = recipe("longer.yaml", engine=engine, **{**PLAIN, "trainer__max_steps": 3})
    assert main(["fit", *longer, "--ckpt_path", "last"]) == 0
    assert run.checkpoints.is_symlink() and run.names() == ["step=2", "step=3"]
    assert (tmp_path / "disk" / "model" / "README.md").exists()
    assert main(["verify", str(run.root)]) == 0
    copy = shutil.copytree(run.root, tmp_path / "copy", symlinks=True)
    before = read_tree(tmp_path / "disk")
    capfd.readouterr()
    assert main(["fit", *arguments, "--trainer.default_root_dir", str(copy), "--overwrite", "true"]) == 2
    assert "checkpoints is a link to" in capfd.readouterr().err and read_tree(tmp_path / "disk") == before
    assert main(["fit", *arguments, "--overwrite", "true"]) == 0
    assert run.names() == ["step=2"]


def test_pipes_in_an_untrusted_run_folder_are_not_read(finished, recipe, capfd):
    """`verify` with manifest.json, and a resume with run-files.json, as a named pipe, on which a reader would block."""
    run = finished("run", **PLAIN)
    arguments = recipe(**{**PLAIN, "trainer__max_steps": 4})
    for path, words in ((run.manifest, ["verify", str(run.root)]),
                        (run.root / LIST, ["fit", *arguments, "--ckpt_path", "last"])):
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        capfd.readouterr()
        assert main(words) == 2
        error = capfd.readouterr().err
        assert error.startswith("error: ") and f"{path} is damaged" in error, error
        path.unlink()
        path.write_bytes(content)


def test_merge_replaces_a_link_at_its_temporary_folder(finished, thesis, tmp_path):
    run = finished("run", **PLAIN)
    (tmp_path / ".merged").symlink_to(thesis)
    before = read_tree(thesis)
    assert main(["merge", "--run", str(run.root), "--out", str(tmp_path / "merged")]) == 0
    assert read_tree(thesis) == before and not (tmp_path / "merged").is_symlink()
