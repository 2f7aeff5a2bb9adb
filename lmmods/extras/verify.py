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
from lmmods.runs.manifest import Manifest, describe_environment
from lmmods.runs.model_card import find_file
from lmmods.runs.run_files import OWNER, files_in

SHOWN = 20  # maximum number of files in a list of problems


def verify(run: str) -> None:
    """Check a run's files, data and base model against its manifest.json.

    Nothing in the run folder is changed.

    Args:
        run: Run folder, of either engine, finished or not.

    Raises:
        UserError: It has no manifest, or something differs from it.
    """
    folder, findings = RunFolder(run), Findings()
    manifest = Manifest.read(folder.manifest)
    _check_outputs(folder, manifest, findings)
    _check_checkpoints(folder, findings)
    for key, entries in manifest.starts[-1]["inputs"].items():
        for entry in entries:
            _check_input(key, entry, findings)
    changes = list(describe_changes(manifest.starts[-1], describe_environment()))
    for text in changes:
        findings.add("note", text)
    if not changes:
        findings.add("ok", "code, libraries and environment are as at the run's last start")
    if findings.problems:
        count = len(findings.problems)
        raise UserError(f"{run}: {count} problem{'s' if count > 1 else ''}, see above.")


def describe_changes(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Describe the differences between the environments of two starts."""
    if was["code"]["content"] != now["code"]["content"]:
        def describe(code: dict[str, Any]) -> str:
            commit = f", commit {code['commit'][:10]}" if code.get("commit") else ""
            return f"{code['version']}{commit}" + (f" with {len(code['changed'])} files changed"
                                                   if code.get("changed") else "")
        yield f"code: {describe(was['code'])} then, {describe(now['code'])} now"
    for key in ("python", "platform", "processor"):
        if was[key] != now[key]:
            yield f"{key}: {was[key]} then, {now[key]} now"
    for key in ("packages", "variables"):
        names = [name for name in sorted({**was[key], **now[key]}) if was[key].get(name) != now[key].get(name)]
        if names:
            yield f"{key}: " + "; ".join(f"{name} {was[key].get(name, 'absent')} then, {now[key].get(name, 'absent')} "
                                         "now" for name in names)


def _check_outputs(folder: RunFolder, manifest: Manifest, findings: Findings) -> None:
    """Check config.yaml and the output of a finished run."""
    recipe = yaml.safe_load(as_yaml(manifest.starts[-1]["recipe"]))
    if not folder.config.is_file():
        findings.add("problem", "config.yaml is missing")
    elif _try_read(folder.config) != recipe:
        findings.add("problem", "config.yaml differs from the recipe of the run's last start in manifest.json")
    else:
        findings.add("ok", f"config.yaml is the recipe of the last of {len(manifest.starts)} start(s)")
    if manifest.end is None:
        return findings.add("note", "the run has not finished, so manifest.json does not list its files yet")
    files = manifest.end["files"]
    problems = _compare({name: folder.root / name for name in files}, files)
    _report(problems, "", findings)
    if not problems:
        findings.add("ok", f"{len(files)} files of the run at step {manifest.end['step']}, including model/")
    if foreign := sorted(files_in(folder.model) - {OWNER} - folder.files.inside("model")
                         - {name.removeprefix("model/") for name in files}):
        findings.add("note", f"in model/, but not written by the run: {', '.join(foreign[:SHOWN])}")


def _try_read(path: Path) -> Any:
    try:
        return read_recipe(path)
    except UserError:
        return None


def _check_checkpoints(folder: RunFolder, findings: Findings) -> None:
    intact = []
    for name in folder.names():
        try:
            check_manifest(folder.checkpoint(name))
            intact.append(name)
        except UserError as error:
            findings.add("problem", str(error))
    if intact:
        findings.add("ok", f"checkpoints {', '.join(intact)}: sizes and checksums match")


def _check_input(key: str, entry: dict[str, Any], findings: Findings) -> None:
    """Check one source, model, adapter or tokenizer."""
    what = f"{key} {entry['path']}"
    if "files" not in entry:
        return findings.add("note", f"{what}: not checked, as its files are on the hub")
    files = {name: description for name, description in entry["files"].items() if "hash" in description}
    if remote := len(entry["files"]) - len(files):
        findings.add("note", f"{what}: {remote} remote file(s) not checked")
    if not files:
        return
    paths = {name: _locate(key, entry, name) for name in files}
    problems = _compare(paths, files)
    problems |= {name: "was added" for name in _find_files(key, entry["path"]) if name not in entry["files"]}
    _report(problems, f"{what}: ", findings)
    if not problems:
        is_sampled = any(description["hash"].startswith("blocks:") for description in files.values())
        findings.add("ok", f"{what}: {len(files)} file(s)" + (", large ones by size and 256 blocks"
                                                                      if is_sampled else ""))


def _locate(key: str, entry: dict[str, Any], name: str) -> Path | None:
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


def _compare(paths: dict[str, Path | None], files: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the problem of each wrong file by name."""
    problems = {}
    for name, description in files.items():
        path = paths[name]
        if path is None or not path.is_file():
            problems[name] = "is missing"
        elif not fingerprints.is_as_described(path, description):
            problems[name] = "has changed"
    return problems


def _report(problems: dict[str, str], prefix: str, findings: Findings) -> None:
    for name, problem in list(problems.items())[:SHOWN]:
        findings.add("problem", f"{prefix}{name} {problem}")
    if len(problems) > SHOWN:
        findings.add("problem", f"{prefix}and {len(problems) - SHOWN} more files")
