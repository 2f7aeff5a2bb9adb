"""`verify`: check a run against its manifest.json, and replay its first steps."""

import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import yaml

from lmmods.core import fingerprints
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.versions import ROOT
from lmmods.extras.doctor import Findings
from lmmods.recipe.files import as_yaml, read_recipe
from lmmods.recipe.trust import FLAG, is_trusted
from lmmods.runs.atomic import files_in
from lmmods.runs.checkpoint import check_manifest
from lmmods.runs.folder import RunFolder, checkpoint_position
from lmmods.runs.inside import OWNER
from lmmods.runs.manifest import Manifest, surroundings
from lmmods.runs.model_card import find_file
from lmmods.runs.repair import read_table

SHOWN = 20  # differences shown per kind


def verify(run: str, replay: int | None = None) -> None:
    """Check a run: files, data and base as manifest.json has them; with --replay its first steps, bit for bit.

    Nothing in the run folder is changed.

    Args:
        run: The run folder, of either engine, finished or not.
        replay: Train so many first steps again, in a temporary folder, and compare metrics, checkpoints and rollouts;
            and score the answers of all rollouts again.

    Raises:
        UserError: It has no manifest, or something is not as the run left it.
    """

    folder, findings = RunFolder(run), Findings()
    manifest = Manifest.read(folder.manifest)
    _check_left(folder, manifest, findings)
    _check_checkpoints(folder, findings)
    for key, entries in manifest.starts[-1]["inputs"].items():
        for entry in entries:
            _check_input(key, entry, findings)
    differences = list(changed(manifest.starts[-1], surroundings()))
    for text in differences:
        findings.add("note", text)
    if not differences:
        findings.add("ok", "code, libraries and environment are those of the run's last start")
    if replay is not None:
        replay_run(folder, manifest, replay, findings)
    if findings.problems:
        count = len(findings.problems)
        raise UserError(f"{run}: {count} {'thing is' if count == 1 else 'things are'} not as the run left "
                        f"{'it' if count == 1 else 'them'}, see above.")


def changed(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Describe the differences between the environments of two starts."""
    if was["code"]["content"] != now["code"]["content"]:
        def shown(code: dict[str, Any]) -> str:
            commit = f", commit {code['commit'][:10]}" if code.get("commit") else ""
            return f"{code['version']}{commit}" + (f" with {len(code['changed'])} files changed"
                                                   if code.get("changed") else "")
        yield f"other code: {shown(was['code'])} then, {shown(now['code'])} now"
    for key in ("python", "platform", "processor"):
        if was[key] != now[key]:
            yield f"{key}: {was[key]} then, {now[key]} now"
    for key in ("packages", "variables"):
        names = [name for name in sorted({**was[key], **now[key]}) if was[key].get(name) != now[key].get(name)]
        if names:
            yield f"{key}: " + "; ".join(f"{name} {was[key].get(name, 'absent')} then, {now[key].get(name, 'absent')} "
                                         "now" for name in names)


def _check_left(folder: RunFolder, manifest: Manifest, findings: Findings) -> None:
    """Check config.yaml and the output of a finished run."""
    recipe = yaml.safe_load(as_yaml(manifest.starts[-1]["recipe"]))
    if not folder.config.is_file():
        findings.add("problem", "config.yaml is missing")
    elif _read(folder.config) != recipe:
        findings.add("problem", "config.yaml is not the recipe of the run's last start, which manifest.json holds")
    else:
        findings.add("ok", f"config.yaml is the recipe of the last of {len(manifest.starts)} start(s)")
    if manifest.end is None:
        return findings.add("note", "the run has no end yet, so what it leaves is not listed")
    files = manifest.end["files"]
    wrong = _compare({name: folder.root / name for name in files}, files)
    _tell(wrong, "", findings)
    if not wrong:
        findings.add("ok", f"{len(files)} files that the run left at step {manifest.end['step']}, model/ among them")
    if foreign := sorted(files_in(folder.model) - {OWNER} - folder.files.inside("model")
                         - {name.removeprefix("model/") for name in files}):
        findings.add("note", f"in model/, but of no run: {', '.join(foreign[:SHOWN])}")


def _read(path: Path) -> Any:
    try:
        return read_recipe(path)
    except UserError:
        return None


def _check_checkpoints(folder: RunFolder, findings: Findings) -> None:
    whole = []
    for name in folder.names():
        try:
            check_manifest(folder.checkpoint(name))
            whole.append(name)
        except UserError as error:
            findings.add("problem", str(error))
    if whole:
        findings.add("ok", f"checkpoints {', '.join(whole)}: sizes and checksums")


def _check_input(key: str, entry: dict[str, Any], findings: Findings) -> None:
    """Check one source, model, adapter or tokenizer."""
    what = f"{key} {entry['path']}"
    if "files" not in entry:
        return findings.add("note", f"{what}: not checked, as its files lie on the hub")
    files = {name: told for name, told in entry["files"].items() if "hash" in told}
    if remote := len(entry["files"]) - len(files):
        findings.add("note", f"{what}: {remote} file(s) not checked, as they lie on the network")
    if not files:
        return
    places = {name: _place(key, entry, name) for name in files}
    wrong = _compare(places, files)
    wrong |= {name: "was added" for name in _found(key, entry["path"]) if name not in entry["files"]}
    _tell(wrong, f"{what}: ", findings)
    if not wrong:
        sampled = any(told["hash"].startswith("blocks:") for told in files.values())
        findings.add("ok", f"{what}: {len(files)} file(s)" + (", large ones by size and 256 blocks" if sampled else ""))


def _place(key: str, entry: dict[str, Any], name: str) -> Path | None:
    """Return the expected path of an input's file."""
    if key in ("data.source", "data.val_source", "data.decontaminate"):
        return Path(name)
    path = Path(entry["path"]).expanduser()
    return path if path.is_file() else find_file(entry["path"], name, entry.get("commit"))


def _found(key: str, path: str) -> list[str]:
    """Return the files that a data source matches now."""
    from lmmods.data.sources.source_reader import find_files

    try:
        return find_files(path) if key.startswith("data.") and key != "data.tokenizer" and "://" not in path else []
    except UserError:  # missing files are reported one by one
        return []


def _compare(places: dict[str, Path | None], files: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the problem of each wrong file by name."""
    wrong = {}
    for name, told in files.items():
        place = places[name]
        if place is None or not place.is_file():
            wrong[name] = "is missing"
        elif not fingerprints.is_as_described(place, told):
            wrong[name] = "is another file than then"
    return wrong


def _tell(wrong: dict[str, str], where: str, findings: Findings) -> None:
    for name, what in list(wrong.items())[:SHOWN]:
        findings.add("problem", f"{where}{name} {what}")
    if len(wrong) > SHOWN:
        findings.add("problem", f"{where}{len(wrong) - SHOWN} more files")


# ---------------------------------------------------------------------------------------------------------------------
# Replay of the first steps of a run in a temporary folder, compared bit for bit.

TIMED, SECONDS = ("train/tokens_per_second", "train/mfu"), "train/seconds/"
Start = dict[str, Any]


def replay_run(run: RunFolder, manifest: Manifest, num_steps: int, findings: Findings) -> None:
    """Retrain the first steps as in the run and compare metrics.csv, checkpoints and a finished model.

    Raises:
        UserError: There is nothing to compare, or training fails.
    """
    if num_steps < 1:
        raise UserError(f"--replay is {num_steps}, but must be 1 or more.")
    rows = {int(row["step"]): row for row in read_table(run.metrics_csv).rows}
    saved = [checkpoint_position(name)[0] for name in run.names() if not checkpoint_position(name)[1]]
    known = sorted({*rows, *saved} - {0})
    if not known or num_steps < known[0]:
        raise UserError(f"--replay {num_steps}: the run has " + (
            f"logged and saved nothing before step {known[0]}: take --replay {known[0]} or more." if known
            else "logged and saved no step yet."))
    num_steps = min(num_steps, known[-1])
    with tempfile.TemporaryDirectory(prefix="replay-") as temporary:
        again = RunFolder(Path(temporary) / "run")
        for number, (start, end) in enumerate(stretches(manifest.starts, num_steps)):
            path = Path(temporary) / f"{number}.yaml"
            path.write_text(as_yaml(recipe_of(start, again.root, keep_all=any(step < num_steps for step in saved))),
                            encoding="utf-8")
            say(f"Replaying to step {end} of {num_steps} on the engine {start['engine']} ...")
            arguments = ["fit", "--config", str(path), "--stop_at", str(end)]
            arguments += (["--ckpt_path", "last"] if number else []) + ([FLAG, "true"] if is_trusted() else [])
            if status := train(arguments):
                raise UserError(f"--replay: training ended with status {status}; its output is above.")
        for text in other_machine(manifest.starts[0], Manifest.read(again.manifest).starts[0]):
            findings.add("note", text)
        _compare_rows(rows, again, num_steps, findings)
        _compare_checkpoints(run, again, num_steps, findings)
        _compare_rollouts(run, again, findings)
        _compare_models(manifest, Manifest.read(again.manifest), findings)
    score_again(run, manifest.starts[-1], findings)


def stretches(starts: list[Start], num_steps: int) -> list[tuple[Start, int]]:
    """Return the starts that trained the run's first steps, each with the step it trained to.

    A start from an earlier checkpoint replaces the starts after that checkpoint. A start with an unchanged recipe is
    merged into the previous one.

    Raises:
        UserError: The run began from a checkpoint of another run.
    """
    kept: list[Start] = []
    for start in starts:
        while kept and kept[-1]["step"] >= start["step"]:
            kept.pop()
        kept.append(start)
    if kept[0]["step"]:
        raise UserError(f"--replay: the run began at step {kept[0]['step']}, from {kept[0]['checkpoint']}: its first "
                        "steps are those of that run.")
    kept = [start for before, start in zip([None, *kept], kept, strict=False)
            if before is None or recipe_of(before, Path()) != recipe_of(start, Path())]
    ends = [start["step"] for start in kept[1:]] + [math.inf]
    return [(start, min(end, num_steps)) for start, end in zip(kept, ends, strict=True) if start["step"] < num_steps]


def recipe_of(start: Start, folder: Path, keep_all: bool = False) -> dict[str, Any]:
    """Return the recipe of a start with another run folder, without loggers, uploads and samples.

    Args:
        keep_all: Keep every checkpoint, for comparison.
    """
    recipe = copy.deepcopy(start["recipe"])
    recipe["trainer"] |= {"default_root_dir": str(folder), "enable_checkpointing": True}
    recipe["trainer"].pop("logger", None)
    for block in ("publish", "samples"):
        recipe.pop(block, None)
    if keep_all:
        recipe["checkpoint"]["keep_last"] = 10**6
    return recipe


def train(arguments: list[str]) -> int:
    """Run the program in a separate process, as multi-device launches require. Return its exit status."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run([sys.executable, "-m", "lmmods.cli", *arguments], check=False,
                          env={**os.environ, "PYTHONPATH": path}).returncode


def other_machine(was: Start, now: Start) -> list[str]:
    """Describe the differences in devices and settings of two starts, ignoring keys that only one engine has."""
    def flat(start: Start) -> dict[str, Any]:
        return {**start["machine"], **start["machine"]["settings"], "settings": None}

    then, here = flat(was), flat(now)
    return [f"{key.replace('_', ' ')}: {then[key]} then, {here[key]} now" for key in then
            if key in here and then[key] != here[key]]


def _compare_rows(rows: dict[int, dict[str, str]], again: RunFolder, num_steps: int, findings: Findings) -> None:
    found = {int(row["step"]): row for row in read_table(again.metrics_csv).rows}
    rollouts = {path.stem for path in again.rollouts.glob("*.safetensors")}
    has_next = not rollouts or f"step={num_steps}" in rollouts
    count = 0
    for step, row in sorted(rows.items()):
        if step > num_steps:
            break
        other = found.get(step, {})
        for name, cell in row.items():
            if name in TIMED or name.startswith(SECONDS) or name not in other and not name.startswith("train/"):
                continue  # the replay stops before validating its last step
            if step == num_steps and not has_next and name not in other and "train/loss" in other:
                continue  # of the rollout that begins after the last step, and that the replay does not draw
            if cell != other.get(name):
                return findings.add("problem", f"metrics.csv: step {step} is the first that differs: {name} was {cell} "
                                               f"and is {other.get(name, 'not logged')}")
            count += name != "step"
    if count:
        findings.add("ok", f"metrics.csv: {count} numbers of the first {num_steps} steps are the same to the last bit")


def _compare_checkpoints(run: RunFolder, again: RunFolder, num_steps: int, findings: Findings) -> None:
    for name in run.names():
        step, open_batches = checkpoint_position(name)
        if open_batches or step > num_steps or name not in again.names():
            continue
        difference, count = first_difference(run.checkpoint(name), again.checkpoint(name))
        if difference:
            findings.add("problem", f"checkpoint {name}: {difference}")
        else:
            findings.add("ok", f"checkpoint {name}: {count} arrays are the same bits")


def first_difference(was: Path, now: Path) -> tuple[str, int]:
    """Describe the first array that differs between two checkpoints, empty if none; and count the equal ones."""
    from lmmods.runs.checkpoint import read_arrays, shards_in

    count = 0
    if any(shards_in(path) is not None for folder in (was, now) for path in folder.glob("*.safetensors")):
        return _first_different_array(read_arrays(was), read_arrays(now))
    for path in sorted(was.glob("*.safetensors")):
        if not (now / path.name).is_file():
            return f"{path.name} has no counterpart: it was written by another number of processes", count
        with open(path, "rb") as one, open(now / path.name, "rb") as other:
            (old, begin), (new, other_begin) = _header(one), _header(other)
            for name in sorted({**old, **new}):
                if (old.get(name) or {}).get("shape") != (new.get(name) or {}).get("shape") or \
                        old[name]["dtype"] != new[name]["dtype"]:
                    return f"{name} in {path.name} has another shape or type", count
                if _bytes(one, begin, old[name]) != _bytes(other, other_begin, new[name]):
                    return f"{name} in {path.name} differs", count
                count += 1
    return "", count


def _first_different_array(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, int]:
    for count, name in enumerate(sorted({**old, **new})):
        one, other = old.get(name), new.get(name)
        if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{name} has another shape or type", count
        if one.tobytes() != other.tobytes():
            return f"{name} differs", count
    return "", len(old)


def _header(file: Any) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's arrays and data offset. Source: https://github.com/huggingface/safetensors"""
    length = int.from_bytes(file.read(8), "little")
    return {name: told for name, told in json.loads(file.read(length)).items() if name != "__metadata__"}, 8 + length


def _bytes(file: Any, begin: int, array: dict[str, Any]) -> bytes:
    first, last = array["data_offsets"]
    file.seek(begin + first)
    return file.read(last - first)


def _compare_rollouts(run: RunFolder, again: RunFolder, findings: Findings) -> None:
    """Compare the rollouts that both have, each of which is one file whatever was computed when."""
    names = sorted({path.name for path in run.rollouts.glob("*.safetensors")}
                   & {path.name for path in again.rollouts.glob("*.safetensors")})
    different = [name for name in names if (run.rollouts / name).read_bytes() != (again.rollouts / name).read_bytes()]
    for name in different[:SHOWN]:
        findings.add("problem", f"rollouts/{name} is another file")
    if names and not different:
        findings.add("ok", f"rollouts: {len(names)} are the same files")


def _compare_models(manifest: Manifest, again: Manifest, findings: Findings) -> None:
    """Compare the weights of the finished models if the replay trained the whole run."""
    if not (manifest.end and again.end and manifest.end["step"] == again.end["step"]):
        return
    for name, told in manifest.end["files"].items():
        if name.endswith(".safetensors"):
            same = again.end["files"].get(name) == told
            findings.add("ok" if same else "problem", f"{name} is {'the same' if same else 'another'} file")


# ---------------------------------------------------------------------------------------------------------------------
# Rewards of stored rollouts, computed again.

def score_again(run: RunFolder, start: Start, findings: Findings) -> None:
    """Score the answers of all rollouts by the rewards of the recipe, and compare with what the run stored.

    Raises:
        UserError: The recipe, its data or a rollout cannot be read.
    """
    from lmmods.rollouts.maker import score_again as scored
    from lmmods.rollouts.rollout import read_rollout, step_of

    steps = sorted(step for path in run.rollouts.glob("*.safetensors") if (step := step_of(path)) is not None)
    if not steps:
        return
    if start["recipe"]["model"]["init_args"].get("environment") is not None:
        return findings.add("note", "rollouts: rewards are not computed again, as answers had an environment")
    say(f"Scoring the answers of {len(steps)} rollouts again ...")
    found: dict[str, list[str]] = {}
    with _scoring(start) as (rewards, data, by_model):
        for step in steps:
            groups = read_rollout(run.rollouts, f"step={step}").groups
            for was, now in zip(groups, scored(rewards, data, groups), strict=True):
                for number, (old, new) in enumerate(zip(was.answers, now.answers, strict=True)):
                    for name in {**old.rewards, **new.rewards}:
                        kind, text = compare_reward(name, old, new)
                        kind = "by model" if kind == "differs" and name in by_model else kind
                        found.setdefault(kind, []).append(
                            f"rollout step={step}, prompt {was.prompt}, answer {number}: {name} {text}")
    if wrong := found.get("differs", []):
        for text in wrong[:SHOWN]:
            findings.add("problem", text)
        if len(wrong) > SHOWN:
            findings.add("problem", f"{len(wrong) - SHOWN} more rewards")
    for kind, words in (("missing", "are missing now as then"), ("there now", "were missing and are there now"),
                        ("by model", "of a model differ, as on another device or in other batches")):
        if texts := found.get(kind):
            findings.add("note", f"rollouts: {len(texts)} rewards {words} (first: {texts[0]})")
    if same := len(found.get("same", [])):
        findings.add("ok", f"rollouts: {same} rewards are the same, computed again")


def compare_reward(name: str, was: Any, now: Any) -> tuple[Literal["same", "differs", "missing", "there now"], str]:
    """Compare a reward of an answer with the one computed anew, in a word and in words for a report.

    Args:
        was: An `Answer`, like `now`.
    """
    old, new = (answer.rewards.get(name) for answer in (was, now))
    reasons = [answer.reasons.get(name, "it does not apply") for answer in (was, now)]
    shown = [f"{value}" if value is not None else f"missing ({reason})"
             for value, reason in zip((old, new), reasons, strict=True)]
    failed = [name in answer.reasons for answer in (was, now)]
    if all(failed):
        return "missing", f"is {shown[1]}"
    if failed[0]:
        return "there now", f"was {shown[0]} and is {shown[1]}"
    return "same" if old == new and not failed[1] else "differs", f"was {shown[0]} and is {shown[1]}"


@contextmanager
def _scoring(start: Start) -> Iterator[tuple[Any, Any, set[str]]]:
    """Yield what scores answers by the recipe of a start, its data, and the names of the rewards by a model."""
    from lmmods.commands.setup import Setup
    from lmmods.recipe.reader import parse
    from lmmods.recipe.rewards import Model, read_rewards
    from lmmods.rollouts.rewards import Rewards

    with tempfile.TemporaryDirectory(prefix="rewards-") as temporary:
        path = Path(temporary) / "recipe.yaml"
        path.write_text(as_yaml(recipe_of(start, Path(temporary) / "run")), encoding="utf-8")
        parsed = parse(["validate", "--config", str(path), *([FLAG, "true"] if is_trusted() else [])], {})
        # torch's trainer requires its devices to be present.
        here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": "32-true",
                "plugins": None}
        setup = Setup(parsed, **(here if parsed.engine == "torch" else {}))
        task, data = setup.model, setup.datamodule
        data.prepare_data()
        data.setup("fit")
        settings = read_rewards(task.rewards)
        with Rewards(settings, task.reward_timeout, task.reward_processes, data.reward_scorers) as rewards:
            yield rewards, data, {each.name for each in settings if isinstance(each, Model)}
