"""manifest.json records a run's inputs and outputs; `verify` checks both."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from lmmods.cli import main
from lmmods.core import fingerprints, hardware, versions
from lmmods.core.errors import UserError
from lmmods.runs.folder import RunFolder
from lmmods.runs.manifest import Manifest
from tests.finished_runs import assert_same_run

ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Hashes and versions -------------------------------------------------------------------------------------------------


def test_hashes_equal_those_of_b2sum_and_sha256sum(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"abc")
    # The outputs of `b2sum -l 128` and `sha256sum`.
    assert fingerprints.describe_file(path) == {"bytes": 3, "hash": "blake2b:cf4ab791c62b8d2b2109c90275287816"}
    assert fingerprints.sha256(path) == {
        "bytes": 3, "hash": "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
    for described in (fingerprints.describe_file(path), fingerprints.sha256(path)):
        assert fingerprints.is_as_described(path, described)
        path.write_bytes(b"abd")
        assert not fingerprints.is_as_described(path, described)
        path.write_bytes(b"abc")


def test_large_weights_are_hashed_by_blocks_and_hub_files_by_name(tmp_path):
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    blob, link = tmp_path / "blobs" / digest, tmp_path / "snapshots" / "model.safetensors"
    for path in (blob, link):
        path.parent.mkdir()
    with open(blob, "wb") as file:
        file.truncate(fingerprints.SAMPLED_ABOVE + 1)
    link.symlink_to(blob)
    assert fingerprints.describe_file(link)["hash"] == f"sha256:{digest}"
    assert not fingerprints.is_as_described(link, fingerprints.describe_file(link))  # the name alone is no evidence
    plain = blob.rename(tmp_path / "model.safetensors")
    described = fingerprints.describe_file(plain)
    assert described["hash"].startswith("blocks:") and fingerprints.is_as_described(plain, described)
    with open(plain, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert not fingerprints.is_as_described(plain, described)


def test_a_checkout_and_an_installation_declare_the_same_dependencies(tmp_path):
    checkout, installed = versions.Project.read(), versions.Project.read(tmp_path)
    names = {dependency.name for dependency in checkout.dependencies}
    assert {"torch", "jax", "deepspeed", "pytest"} <= names and versions.NAME not in names
    assert installed.version == checkout.version and {dependency.name for dependency in installed.dependencies} & names
    torch = next(dependency for dependency in checkout.dependencies if dependency.name == "torch")
    assert torch.is_tested and torch.tested_versions.startswith(">=") and torch.extra is None
    assert not versions.Dependency("torch", "<1", None).is_tested
    assert versions.Dependency("no-such-library", "", None).installed is None
    assert "pytest" not in versions.installed_packages() and "jaxlib" in versions.installed_packages()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_code_version_is_the_commit_and_the_files_changed_since(tmp_path):
    def git(*words: str) -> str:
        return subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=tmp_path, check=True,
                              capture_output=True, text=True).stdout.strip()

    for name in ("train.py", "lmmods/a b.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    clean = versions.code_version(tmp_path)
    assert clean["commit"] == git("rev-parse", "HEAD") and clean["changed"] == []
    (tmp_path / "lmmods" / "a b.py").write_text("other")
    (tmp_path / "lmmods" / "new.py").write_text("new")
    (tmp_path / "notes.txt").write_text("no code")
    changed = versions.code_version(tmp_path)
    assert changed["changed"] == ["lmmods/a b.py", "lmmods/new.py"] and changed["content"] != clean["content"]
    shutil.rmtree(tmp_path / ".git")
    assert "commit" not in versions.code_version(tmp_path)


def test_environment_variables_are_recorded_without_secrets(monkeypatch):
    monkeypatch.setattr("os.environ", {
        "OMP_NUM_THREADS": "3", "XLA_FLAGS": "--x", "CUDA_VISIBLE_DEVICES": "1", "HF_TOKEN": "hf_" + "a" * 30,
        "JAX_COMPILATION_CACHE_DIR": "/c", "CUDA_HOME": "/u", "OMP_WAIT_POLICY": "PASSIVE",
        "JAX_PLATFORMS": "http://u:word@host", "PATH": "/bin"})
    assert hardware.variables() == {"OMP_NUM_THREADS": "3", "XLA_FLAGS": "--x", "CUDA_VISIBLE_DEVICES": "1",
                                   "JAX_PLATFORMS": "http://***@host"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"starts": [], "end": null}', '{"starts": [{"step": "a"}]}'])
def test_a_damaged_manifest_is_an_error(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="manifest.json is damaged"):
        Manifest.read(tmp_path / "manifest.json")


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@ENGINES
def test_verify_finds_no_problem_in_an_untouched_run_and_changes_nothing(engine, finished, capsys):
    run = finished(engine=engine)
    before = read_files(run.root)
    assert main(["verify", str(run.root)]) == 0
    output = capsys.readouterr().out
    assert "step=6: sizes and checksums match" in output and "files of the run at step 6" in output
    assert "problem" not in output
    assert read_files(run.root) == before


@pytest.mark.slow
@ENGINES
def test_two_runs_of_a_recipe_have_the_same_bits(engine, finished, recipe, capsys):
    arguments = recipe(engine=engine)
    assert main(["fit", *arguments]) == 0
    assert_same_run(RunFolder(Path(arguments[1]).parent / "run"), finished(engine=engine))


@pytest.mark.slow
@ENGINES
def test_each_start_is_recorded_with_its_recipe(engine, recipe, capsys):
    arguments = recipe(engine=engine)
    run = RunFolder(Path(arguments[1]).parent / "run")
    assert main(["fit", *arguments, "--stop_at", "3"]) == 0
    assert "Stopped at step 3, as set by --stop_at." in capsys.readouterr().err
    assert main(["fit", *arguments, "--stop_at", "3", "--ckpt_path", "last"]) == 2
    assert "must be more than 3" in capsys.readouterr().err
    assert main(["fit", *arguments, "--ckpt_path", "last", "--model.optimizer.lr", "0.005", "--stop_at", "5"]) == 0
    manifest = Manifest.read(run.manifest)
    assert [(start["step"], start["recipe"]["model"]["init_args"]["optimizer"]["lr"], start["engine"])
            for start in manifest.starts] == [(0, 0.01, engine), (3, 0.005, engine)]
    assert manifest.end is None and manifest.starts[1]["checkpoint"].endswith("step=3")
    assert manifest.starts[0]["machine"]["num_devices"] == 1


@pytest.mark.slow
def test_a_run_stopped_by_stop_at_resumes_with_the_same_bits(finished, recipe):
    arguments = recipe()
    run = RunFolder(Path(arguments[1]).parent / "run")
    for more in (["--stop_at", "2"], ["--ckpt_path", "last", "--stop_at", "6"]):  # the last step completes the run
        assert main(["fit", *arguments, *more]) == 0
    assert_same_run(run, finished())


@pytest.mark.slow
def test_verify_reports_every_difference(finished, capsys):
    run = finished(copy="own")
    first, *rest = run.metrics_csv.read_text().splitlines()
    run.metrics_csv.write_text("\n".join([first, rest[0], rest[1].replace(".", ".0", 1), *rest[2:], ""]))
    array = run.checkpoint("step=6") / "model.safetensors"
    array.write_bytes(array.read_bytes()[:-1] + b"\x01")
    (run.model / "README.md").unlink()
    (run.model / "mine.txt").touch()
    manifest = json.loads(run.manifest.read_text())
    last = manifest["starts"][-1]
    last["packages"]["torch"] = "0.1"
    entry = last["inputs"]["model.pretrained"][0]
    assert entry["files"].keys() >= {"config.json", "model.safetensors", "tokenizer.json"}
    entry["files"]["config.json"]["hash"] = "blake2b:0"
    entry["files"]["gone.json"] = {"bytes": 1, "hash": "blake2b:0"}
    run.manifest.write_text(json.dumps(manifest))
    assert main(["verify", str(run.root)]) == 2
    output = capsys.readouterr().out
    for text in ("config.yaml differs from the recipe", "metrics.csv has changed", "model/README.md is missing",
                 "in model/, but not written by the run: mine.txt",
                 "model.safetensors has changed since", "config.json has changed", "gone.json is missing",
                 "packages: torch 0.1 then"):
        assert text in " ".join(output.split()), (text, output)
    run.manifest.unlink()
    assert main(["verify", str(run.root)]) == 2 and "manifest.json does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_verify_reports_added_and_changed_data_files(recipe, instructions, tmp_path, capsys):
    folder = tmp_path / "rows"
    folder.mkdir()
    shutil.copy(instructions, folder / "a.jsonl")
    arguments = recipe(data__init_args__source=str(folder), trainer__max_steps=1)
    run = tmp_path / "run"
    assert main(["fit", *arguments]) == 0
    assert main(["verify", str(run)]) == 0
    (folder / "b.jsonl").write_text("{}")
    (folder / "a.jsonl").write_text("{}")
    assert main(["verify", str(run)]) == 2
    output = " ".join(capsys.readouterr().out.split())
    assert "a.jsonl has changed" in output and "b.jsonl was added" in output
