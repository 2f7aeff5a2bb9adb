"""`verify`: check a run's files against its manifest.json."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lmmods.core import fingerprints
from lmmods.core.errors import UserError
from lmmods.extras.doctor import Findings
from lmmods.recipe.files import as_yaml, read_recipe
from lmmods.runs.checkpoint import check_manifest
from lmmods.runs.folder import RunFolder
from lmmods.runs.manifest import Manifest, surroundings
from lmmods.runs.model_card import find_file
from lmmods.runs.run_files import OWNER, files_in

SHOWN = 20  # differences shown per kind


def verify(run: str) -> None:
    """Check that a run's files, its data and its base are as manifest.json describes them.

    Nothing in the run folder is changed.

    Args:
        run: The run folder, of either engine, finished or not.

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
    differences = list(describe_changes(manifest.starts[-1], surroundings()))
    for text in differences:
        findings.add("note", text)
    if not differences:
        findings.add("ok", "code, libraries and environment are those of the run's last start")
    if findings.problems:
        count = len(findings.problems)
        raise UserError(f"{run}: {count} {'thing is' if count == 1 else 'things are'} not as the run left "
                        f"{'it' if count == 1 else 'them'}, see above.")


def describe_changes(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
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
    wrong |= {name: "was added" for name in _find_files(key, entry["path"]) if name not in entry["files"]}
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


def _find_files(key: str, path: str) -> list[str]:
    """Return the files that a data source matches now."""
    from lmmods.data.read.source_reader import find_files

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
