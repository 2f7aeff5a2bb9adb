"""Publishing to the hub, against a stand-in that records the calls. Needs no network and no token."""

import json
import threading
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from safetensors.torch import load_file

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.recipe.block_fields import BenchmarkScore
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.callbacks.export import Publish

TOKEN = "hf_secretOfThisTest"


class Hub:
    """A stand-in for HfApi that records calls in order; `broken` contains the indices of uploads that fail."""

    def __init__(self):
        self.created, self.uploads = [], []
        self.broken, self.private, self.down = set(), True, False
        self.gate = None  # an upload waits for it

    def create_repo(self, repo, *, private, exist_ok):
        if self.down:
            raise OSError("no route to the hub")
        self.created.append((repo, private, exist_ok))

    def repo_info(self, repo):
        return type("Info", (), {"private": self.private})()

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        if self.gate is not None:
            self.gate.wait(20)
        index = len(self.uploads)
        card = (Path(folder_path) / "README.md").read_text()
        self.content = b"".join(path.read_bytes() for path in Path(folder_path).rglob("*") if path.is_file())
        self.uploads.append((repo_id, commit_message, {path.name for path in Path(folder_path).iterdir()}, card))
        if index in self.broken:
            raise OSError(f"the connection broke\nBearer {TOKEN}" if index else f"illegal header Bearer {TOKEN}")


@pytest.fixture
def hub(monkeypatch):
    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: TOKEN)
    return fake


@pytest.fixture
def wait_for_uploads(monkeypatch):
    """Training waits for each upload, so that none is skipped."""
    start_upload = Publish.upload

    def upload(self, *args):
        start_upload(self, *args)
        if self._upload is not None:
            self._upload.join()

    monkeypatch.setattr(Publish, "upload", upload)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def block(**changes) -> dict:
    return {"publish": {"repo": "someone/tiny", **changes}}


def test_the_finished_model_is_uploaded_with_its_card_and_no_local_path(recipe, folder, hub, llama_folder, capsys):
    assert main(["fit", *recipe(**block(license="mit"))]) == 0
    assert hub.created == [("someone/tiny", True, True)]
    [(repo, message, files, card)] = hub.uploads
    assert repo == "someone/tiny" and "6" in message
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= files
    metrics = json.loads(folder.metrics_json.read_text())
    metadata = huggingface_hub.ModelCard(card).data
    assert metadata.license == "mit" and metadata.library_name == "peft" and metadata.pipeline_tag == "text-generation"
    assert {result.metric_name: result.metric_value for result in metadata.eval_results} == {
        name: value for name, value in metrics.items() if name.startswith("val/")}
    assert 'name = "someone/tiny"' in card
    # no uploaded file contains a local path, and the local folder still finds its base
    assert str(llama_folder).encode() not in hub.content and str(folder.root).encode() not in hub.content
    local_config = json.loads((folder.model / "adapter_config.json").read_text())
    assert local_config["base_model_name_or_path"] == str(llama_folder)
    assert not list(folder.root.glob(".upload-*"))
    assert "Uploaded" in capsys.readouterr().out


def read_scores(folder: RunFolder) -> dict[str, list[tuple]]:
    """Read the scores of each file with the hub's library."""
    return {path.name: [(entry.dataset_id, entry.dataset_revision, entry.task_id, entry.value, entry.notes)
                        for entry in huggingface_hub.parse_eval_result_entries(yaml.safe_load(path.read_text()))]
            for path in (folder.model / ".eval_results").iterdir()}


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_benchmark_scores_are_uploaded_with_the_model(recipe, folder, hub, capsys, instructions, engine):
    named = [{"metric": "val/loss", "dataset": "some/bench", "task": "first", "scale": 100.0, "notes": "no tools"},
             {"metric": "test/loss", "dataset": "some/bench", "task": "second", "revision": "abc"},
             {"metric": "eval/mine/acc", "dataset": "other/bench", "task": "mine"},
             {"metric": "val/loos", "dataset": "other/bench", "task": "third"},
             {"metric": "test/loos", "dataset": "other/bench", "task": "fourth"}]
    arguments = recipe(engine=engine, data__init_args__test_source=str(instructions), **block(eval_results=named))
    assert main(["fit", *arguments]) == 0
    loss = json.loads(folder.metrics_json.read_text())["val/loss"]
    assert read_scores(folder) == {"some--bench.yaml": [("some/bench", None, "first", loss * 100, "no tools")]}
    assert "dataset:\n    id: some/bench" in hub.content.decode(errors="ignore")
    output = " ".join(capsys.readouterr().out.split())
    assert "val/loos is not a metric of this run, so no score on other/bench is written" in output
    assert "eval/mine" not in output and "test/loos" not in output
    assert main(["test", *arguments, "--ckpt_path", "last"]) == 0
    assert "test/loos is not a metric of this run" in capsys.readouterr().out
    test_loss = json.loads(folder.metrics_json.read_text())["test/loss"]
    assert read_scores(folder)["some--bench.yaml"][1] == ("some/bench", "abc", "second", test_loss, None)
    folder.merge_metrics({"eval/mine/acc": 0.5})  # as the command evaluate does
    assert read_scores(folder)["other--bench.yaml"] == [("other/bench", None, "mine", 0.5, None)]
    capsys.readouterr()
    assert main(["verify", str(folder.root)]) == 0 and "not written by the run" not in capsys.readouterr().out


def test_every_checkpoint_is_uploaded_and_training_keeps_its_bits(recipe, folder, hub, tmp_path, wait_for_uploads):
    changes = {"model__init_args__save_dtype": "bfloat16"}  # rounds the exported weights, not those in training
    assert main(["fit", *recipe(**block(when="save"), **changes)]) == 0
    assert [message for _, message, _, _ in hub.uploads] == [
        "Step 2", "Step 4", "Step 6", "Finished at step 6"]
    assert all({"adapter_model.safetensors", "README.md"} <= files for _, _, files, _ in hub.uploads)
    assert not (folder.root / ".publish").exists()
    alone = RunFolder(tmp_path / "alone")
    assert main(["fit", *recipe("alone.yaml", trainer__default_root_dir=str(alone.root), **changes)]) == 0
    for file in ("model", "optimizer"):
        weights, expected = (load_file(run.resolve("last") / f"{file}.safetensors") for run in (folder, alone))
        assert all((weights[name] == tensor).all() for name, tensor in expected.items())


def test_failed_uploads_are_reported_once_and_training_continues(recipe, folder, hub, capsys, wait_for_uploads):
    hub.broken = {0, 1}
    assert main(["fit", *recipe(**block(when="save"))]) == 0
    output = capsys.readouterr()
    assert output.out.count("warning: The upload of step 2") == 1 and "The upload of step 4" not in output.out
    assert len(hub.uploads) == 4 and folder.completed.exists()
    written = "".join(path.read_text(errors="ignore") for path in folder.root.rglob("*") if path.is_file())
    assert TOKEN not in output.out + output.err + written and "***" in output.out


def test_a_failed_last_upload_is_an_error_after_the_model_is_saved(recipe, folder, hub, capsys):
    hub.broken = {0}
    assert main(["fit", *recipe(**block())]) == 2
    error = capsys.readouterr().err
    assert f"hf upload someone/tiny {folder.model}" in error and TOKEN not in error
    assert folder.completed.exists() and (folder.model / "adapter_model.safetensors").exists()
    assert folder.names()[-1] == "step=6"


def test_a_slow_upload_skips_the_next_one(recipe, hub, capsys, monkeypatch):
    hub.gate = threading.Event()  # opens after the last step
    monkeypatch.setattr(Publish, "on_train_end", lambda *_: hub.gate.set())
    assert main(["fit", *recipe(**block(when="save"))]) == 0
    assert "step 4 is not uploaded" in capsys.readouterr().out
    assert [message for _, message, _, _ in hub.uploads] == ["Step 2", "Finished at step 6"]


@pytest.mark.parametrize(("break_it", "message"), [
    (lambda hub, patch: patch.setattr(huggingface_hub, "get_token", lambda: None), "no Hugging Face token"),
    (lambda hub, patch: patch.setattr(hub, "down", True), "no route to the hub"),
    (lambda hub, patch: patch.setattr(hub, "private", False), "someone/tiny exists and is public"),
])
def test_a_run_that_cannot_be_published_is_rejected_before_training(recipe, folder, hub, monkeypatch, capsys, break_it,
                                                                    message):
    break_it(hub, monkeypatch)
    assert main(["fit", *recipe(**block())]) == 2
    assert message in capsys.readouterr().err
    assert not folder.root.exists() and not hub.uploads


def test_a_token_in_the_recipe_is_rejected_and_not_printed(recipe, folder, hub, capsys):
    assert main(["fit", *recipe(**block(token=TOKEN))]) == 2
    output = capsys.readouterr()
    assert "token" in output.err and TOKEN not in output.out + output.err


def test_without_a_repository_the_hub_is_not_called(recipe, folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    assert main(["fit", *recipe()]) == 0
    assert main(["validate", *recipe("other.yaml", **block()), "--ckpt_path", "last"]) == 0


@pytest.mark.parametrize(("settings", "message"), [
    ({"repo": "no-user"}, "publish.repo is no-user"), ({"repo": "a/b/c"}, "publish.repo"),
    ({"license": "mit"}, "publish.license"),
])
def test_invalid_publish_settings_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        Publish(**settings)


@pytest.mark.parametrize(("changes", "message"), [
    ({"metric": "train/loss"}, "publish.eval_results.metric is train/loss"),
    ({"dataset": "b"}, "publish.eval_results.dataset is b, .*owner/name"),
    ({"task": " "}, "publish.eval_results.task is ' '"),
    ({"scale": 0.0}, "publish.eval_results.scale is 0"),
])
def test_invalid_benchmark_scores_are_rejected(changes, message):
    with pytest.raises(UserError, match=message):
        BenchmarkScore(**{"metric": "val/loss", "dataset": "a/b", "task": "c", **changes})
