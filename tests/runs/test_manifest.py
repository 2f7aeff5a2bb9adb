"""manifest.json: what a run was made of and has left; `verify`, which checks both, and its replay."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmmods.cli import main
from lmmods.core import fingerprints, hardware, versions
from lmmods.core.errors import UserError
from lmmods.extras import verify
from lmmods.extras.doctor import Findings
from lmmods.rollouts.rollout import read_rollout
from lmmods.runs.folder import RunFolder
from lmmods.runs.manifest import Manifest
from lmmods.runs.repair import read_table
from tests.finished_runs import assert_same_run

ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def in_process(monkeypatch):
    """A replay trains in this process."""
    monkeypatch.setattr(verify, "train", main)


# Hashes and versions -------------------------------------------------------------------------------------------------


def test_hashes_are_those_of_the_usual_programs(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"abc")
    # of `b2sum -l 128` and `sha256sum`
    assert fingerprints.described(path) == {"bytes": 3, "hash": "blake2b:cf4ab791c62b8d2b2109c90275287816"}
    assert fingerprints.sha256(path) == {
        "bytes": 3, "hash": "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
    for described in (fingerprints.described(path), fingerprints.sha256(path)):
        assert fingerprints.is_as_described(path, described)
        path.write_bytes(b"abd")
        assert not fingerprints.is_as_described(path, described)
        path.write_bytes(b"abc")


def test_large_weights_are_described_by_blocks_and_those_of_the_hub_by_their_name(tmp_path):
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    blob, link = tmp_path / "blobs" / digest, tmp_path / "snapshots" / "model.safetensors"
    for path in (blob, link):
        path.parent.mkdir()
    with open(blob, "wb") as file:
        file.truncate(fingerprints.SAMPLED_ABOVE + 1)
    link.symlink_to(blob)
    assert fingerprints.described(link)["hash"] == f"sha256:{digest}"
    assert not fingerprints.is_as_described(link, fingerprints.described(link))  # its name does not make it so
    plain = blob.rename(tmp_path / "model.safetensors")
    described = fingerprints.described(plain)
    assert described["hash"].startswith("blocks:") and fingerprints.is_as_described(plain, described)
    with open(plain, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert not fingerprints.is_as_described(plain, described)


def test_a_checkout_and_an_installation_declare_the_same(tmp_path):
    checkout, installed = versions.Project.read(), versions.Project.read(tmp_path)
    names = {each.name for each in checkout.dependencies}
    assert {"torch", "jax", "deepspeed", "pytest"} <= names and versions.NAME not in names
    assert installed.version == checkout.version and {each.name for each in installed.dependencies} & names
    torch = next(each for each in checkout.dependencies if each.name == "torch")
    assert torch.was_tried and torch.tried.startswith(">=") and torch.extra is None
    assert not versions.Dependency("torch", "<1", None).was_tried
    assert versions.Dependency("no-such-library", "", None).installed is None
    assert "pytest" not in versions.installed_packages() and "jaxlib" in versions.installed_packages()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_and_what_differs_from_it(tmp_path):
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
    now = versions.code_version(tmp_path)
    assert now["changed"] == ["lmmods/a b.py", "lmmods/new.py"] and now["content"] != clean["content"]
    shutil.rmtree(tmp_path / ".git")
    assert "commit" not in versions.code_version(tmp_path)


def test_variables_that_change_numbers_are_kept_without_secrets(monkeypatch):
    monkeypatch.setattr("os.environ", {
        "OMP_NUM_THREADS": "3", "XLA_FLAGS": "--x", "CUDA_VISIBLE_DEVICES": "1", "HF_TOKEN": "hf_" + "a" * 30,
        "JAX_COMPILATION_CACHE_DIR": "/c", "CUDA_HOME": "/u", "OMP_WAIT_POLICY": "PASSIVE",
        "JAX_PLATFORMS": "http://u:word@host", "PATH": "/bin"})
    assert hardware.variables() == {"OMP_NUM_THREADS": "3", "XLA_FLAGS": "--x", "CUDA_VISIBLE_DEVICES": "1",
                                   "JAX_PLATFORMS": "http://***@host"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"starts": [], "end": null}', '{"starts": [{"step": "a"}]}'])
def test_a_damaged_manifest_is_told(text, tmp_path):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="manifest.json is damaged"):
        Manifest.read(tmp_path / "manifest.json")


# Which recipes the first steps were trained with ----------------------------------------------------------------------


def start(step: int, lr: float = 1.0, folder: str = "a") -> dict:
    return {"step": step, "checkpoint": "elsewhere", "recipe": {
        "trainer": {"default_root_dir": folder, "logger": [folder]}, "model": {"lr": lr}}}


def test_stretches_of_a_run():
    def found(starts: list[dict], steps: int) -> list[tuple[float, int]]:
        return [(each["recipe"]["model"]["lr"], end) for each, end in verify.stretches(starts, steps)]

    assert found([start(0)], 5) == [(1, 5)]
    assert found([start(0), start(3, folder="b")], 5) == [(1, 5)]
    assert found([start(0), start(3, 2), start(6, 2), start(8, 3)], 9) == [(1, 3), (2, 8), (3, 9)]
    assert found([start(0), start(3, 2)], 3) == [(1, 3)]
    assert found([start(0), start(6, 2), start(4, 3)], 9) == [(1, 4), (3, 9)]  # from an earlier checkpoint
    assert found([start(0), start(0, 2)], 9) == [(2, 9)]  # interrupted within the first step
    with pytest.raises(UserError, match="began at step 3, from elsewhere"):
        found([start(3)], 9)


def test_a_replay_does_not_compare_the_rollout_after_its_last_step(tmp_path):
    run, again = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "again")
    again.rollouts.mkdir(parents=True)
    (again.rollouts / "step=0.safetensors").touch()

    def problems(was: str, now: str) -> list[str]:
        findings = Findings()
        for folder, lines in ((run, was), (again, now)):
            folder.root.mkdir(exist_ok=True)
            folder.metrics_csv.write_text(f"step,train/reward,train/loss,val/reward\n{lines}")
        rows = {int(row["step"]): row for row in read_table(run.metrics_csv).rows}
        verify._compare_rows(rows, again, 2, findings)
        return findings.problems

    was = "0,0.5,,\n1,,0.1,\n2,0.75,0.2,0.5\n"
    assert not problems(was, "0,0.5,,\n1,,0.1,\n2,,0.2,\n")
    assert problems(was, "0,0.5,,\n1,,0.1,\n2,,0.3,\n") and problems(was, "0,0.5,,\n1,,0.1,\n")
    assert problems(was, "0,,,\n1,,0.1,\n2,,0.2,\n")  # the first rollout was drawn again
    (again.rollouts / "step=2.safetensors").touch()
    assert problems(was, "0,0.5,,\n1,,0.1,\n2,,0.2,\n")


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@ENGINES
def test_a_run_and_its_first_steps_are_as_they_were(engine, finished, in_process, capsys):
    run = finished(engine=engine)
    before = contents(run.root)
    assert main(["verify", str(run.root), "--replay", "99"]) == 0  # to its end, which leaves a model
    said = capsys.readouterr().out
    assert "numbers of the first 6 steps are the same to the last bit" in said and "problem" not in said
    assert "checkpoint step=6: " in said
    assert "model/adapter_model.safetensors is the same file" in said
    assert contents(run.root) == before


@pytest.mark.slow
@ENGINES
def test_a_resumed_run_is_replayed_with_the_recipe_of_each_part(engine, recipe, in_process, capsys):
    arguments = recipe(engine=engine)
    run = RunFolder(Path(arguments[1]).parent / "run")
    assert main(["fit", *arguments, "--stop_at", "3"]) == 0
    assert "Stopped at step 3, as --stop_at says." in capsys.readouterr().err
    assert main(["fit", *arguments, "--stop_at", "3", "--ckpt_path", "last"]) == 2
    assert "must be more than 3" in capsys.readouterr().err
    assert main(["fit", *arguments, "--ckpt_path", "last", "--model.optimizer.lr", "0.005", "--stop_at", "5"]) == 0
    manifest = Manifest.read(run.manifest)
    assert [(each["step"], each["recipe"]["model"]["init_args"]["optimizer"]["lr"], each["engine"])
            for each in manifest.starts] == [(0, 0.01, engine), (3, 0.005, engine)]
    assert manifest.end is None and manifest.starts[1]["checkpoint"].endswith("step=3")
    assert manifest.starts[0]["machine"]["num_devices"] == 1
    capsys.readouterr()
    assert main(["verify", str(run.root), "--replay", "4"]) == 0
    said = capsys.readouterr().out
    assert "Replaying to step 3 of 4" in said and "of the first 4 steps" in said and "checkpoint step=4: " in said


@pytest.mark.slow
def test_a_run_that_stopped_ends_as_one_that_did_not(finished, recipe):
    arguments = recipe()
    run = RunFolder(Path(arguments[1]).parent / "run")
    for more in (["--stop_at", "2"], ["--ckpt_path", "last", "--stop_at", "6"]):  # the last step ends it
        assert main(["fit", *arguments, *more]) == 0
    assert_same_run(run, finished())


@pytest.mark.slow
def test_each_difference_is_found(finished, in_process, capsys, tmp_path, llama_folder):
    run = finished(copy="own")

    def said(*options: str, status: int = 2) -> str:
        assert main(["verify", str(run.root), *options]) == status
        return capsys.readouterr().out

    first, *rest = run.metrics_csv.read_text().splitlines()
    run.metrics_csv.write_text("\n".join([first, rest[0], rest[1].replace(".", ".0", 1), *rest[2:], ""]))
    array = run.checkpoint("step=6") / "model.safetensors"
    array.write_bytes(array.read_bytes()[:-1] + b"\x01")
    (run.model / "README.md").unlink()
    (run.model / "mine.txt").touch()
    manifest = json.loads(run.manifest.read_text())
    last = manifest["starts"][-1]
    last["packages"]["torch"], last["machine"]["num_devices"] = "0.1", 2
    entry = last["inputs"]["model.pretrained"][0]
    assert entry["files"].keys() >= {"config.json", "model.safetensors", "tokenizer.json"}
    entry["files"]["config.json"]["hash"] = "blake2b:0"
    entry["files"]["gone.json"] = {"bytes": 1, "hash": "blake2b:0"}
    run.manifest.write_text(json.dumps(manifest))
    found = said("--replay", "6")
    for text in ("config.yaml is not the recipe", "metrics.csv is another file than then",
                 "model/README.md is missing", "in model/, but of no run: mine.txt", "model.safetensors is not as it",
                 "config.json is another file than then", "gone.json is missing", "packages: torch 0.1 then",
                 "num devices: 2 then, 1 now", "metrics.csv: step 2 is the first that differs: train/",
                 "checkpoint step=6: ", " in model.safetensors differs", "adapter_model.safetensors is the same file"):
        assert text in " ".join(found.split()), (text, found)
    run.manifest.unlink()
    assert main(["verify", str(run.root)]) == 2 and "no such file" in capsys.readouterr().err


@pytest.mark.slow
@ENGINES
def test_rewards_of_rollouts_are_computed_again(engine, recipe, in_process, capsys):
    """A replay makes the same rollouts. A stored reward that is another one is named, also one that is there now."""
    rewards = [{"name": "regex", "pattern": "[a-m]", "label": "letters"}, {"name": "exact_match"}]
    arguments = recipe(
        engine=engine, trainer__max_steps=2, trainer__limit_val_batches=0, data__class_path="PromptData",
        data__init_args__batch_size=8, model__class_path="GRPO", model__init_args__rewards=rewards,
        model__init_args__num_generations=2, model__init_args__max_new_tokens=4)
    run = RunFolder(Path(arguments[1]).parent / "run")
    assert main(["fit", *arguments]) == 0
    capsys.readouterr()
    assert main(["verify", str(run.root), "--replay", "1"]) == 0  # the second rollout is not drawn again
    assert "rollouts: 1 are the same files" in capsys.readouterr().out
    assert main(["verify", str(run.root), "--replay", "2"]) == 0
    said = capsys.readouterr().out
    assert "rollouts: 2 are the same files" in said
    assert "rollouts: 32 rewards are the same, computed again" in said and "problem" not in said
    rollout = read_rollout(run.rollouts, "step=1")
    changed, failed = rollout.groups[2].answers
    changed.rewards["letters"] = 1 - changed.rewards["letters"]
    failed.rewards["exact_match"], failed.reasons, failed.reward = None, {"exact_match": "took more than 10 s"}, None
    rollout.write(run.rollouts)
    assert main(["verify", str(run.root), "--replay", "2"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    prompt, value = rollout.groups[2].prompt, changed.rewards["letters"]
    for text in ("rollouts/step=1.safetensors is another file",
                 f"rollout step=1, prompt {prompt}, answer 0: letters was {value} and is {1 - value}",
                 "1 rewards were missing and are there now (first: rollout step=1, prompt "
                 f"{prompt}, answer 1: exact_match was missing (took more than 10 s) and is 0.0)",
                 "30 rewards are the same"):
        assert text in said, (text, said)


@pytest.mark.parametrize(("was", "now", "kind"), [
    (0.5, 0.5, "same"), (None, None, "same"), (0.5, 0.25, "differs"), (0.5, None, "differs"), (None, 0.5, "differs"),
    ("slow", "slow", "missing"), ("slow", "crash", "missing"), ("slow", 0.5, "there now"), ("slow", None, "there now"),
    (0.5, "slow", "differs"), (None, "slow", "differs")])
def test_what_has_become_of_a_reward(was, now, kind):
    """A text is the reason why it is missing; None that it does not apply."""
    def answer(value):
        has_failed = isinstance(value, str)
        return SimpleNamespace(rewards={"a": None if has_failed else value}, reasons={"a": value} if has_failed else {})

    found, words = verify.compare_reward("a", answer(was), answer(now))
    assert found == kind and all(str(value) in words for value in (was, now) if kind == "differs" and value is not None)


@pytest.mark.slow
def test_files_of_the_data_that_came_or_went_are_found(recipe, instructions, tmp_path, capsys):
    folder = tmp_path / "rows"
    folder.mkdir()
    shutil.copy(instructions, folder / "a.jsonl")
    arguments = recipe(data__init_args__source=str(folder), trainer__max_steps=1)
    run = tmp_path / "run"
    assert main(["fit", *arguments]) == 0
    assert main(["verify", str(run)]) == 0
    assert main(["verify", str(run), "--replay", "0"]) == 2
    assert "--replay is 0" in capsys.readouterr().err
    (folder / "b.jsonl").write_text("{}")
    (folder / "a.jsonl").write_text("{}")
    assert main(["verify", str(run)]) == 2
    found = " ".join(capsys.readouterr().out.split())
    assert "a.jsonl is another file than then" in found and "b.jsonl was added" in found
