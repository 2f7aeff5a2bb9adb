"""The versions that `make` installs: a lock within the ranges of pyproject.toml, for each supported Python."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / ".ci" / "lock.txt").read_text()
PINS = [Requirement(line) for line in LOCK.splitlines() if line and line[0] not in " #"]
PYTHONS = [f"3.{minor}" for minor in range(30) if f"3.{minor}" in SpecifierSet(PROJECT["requires-python"])]
SYSTEMS = {"linux": "Linux", "darwin": "Darwin", "win32": "Windows"}


def marker_environment(python: str, system: str) -> dict[str, str]:
    return {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": system, "extra": "",
            "platform_system": SYSTEMS[system], "platform_machine": "x86_64",
            "os_name": "nt" if system == "win32" else "posix"}


def pins(python: str, system: str) -> dict[str, list[str]]:
    """Return the pinned versions by normalised package name."""
    versions = {}
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate(marker_environment(python, system)):
            version, = pin.specifier
            assert version.operator == "==" and "*" not in version.version, pin
            versions.setdefault(canonicalize_name(pin.name), []).append(version.version)
    return versions


def direct_requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    requirements = [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]
    return [requirement for requirement in requirements if requirement.name != PROJECT["name"]]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_pins_every_dependency_within_its_range(python, system):
    locked = pins(python, system)
    assert all(len(versions) == 1 for versions in locked.values())
    for requirement in direct_requirements():
        if requirement.marker is None or requirement.marker.evaluate(marker_environment(python, system)):
            version = locked[canonicalize_name(requirement.name)][0]
            assert requirement.specifier.contains(version, prereleases=True), requirement


def test_the_lock_contains_indirect_dependencies():
    """A few of them, one with different versions for different Pythons."""
    for python in PYTHONS:
        assert {"pyyaml", "huggingface-hub", "jaxlib", "pyarrow", "mpmath", "hjson"} <= set(pins(python, "linux"))
    assert pins("3.11", "linux")["jaxlib"] != pins("3.13", "linux")["jaxlib"]


def test_the_lock_names_neither_host_nor_build():
    assert "://" not in LOCK and "--" not in re.sub("#.*", "", LOCK)
    assert "+" not in pins("3.11", "linux")["torch"][0]


def test_the_lock_respects_held_back_versions():
    for line in (ROOT / ".ci" / "hold.txt").read_text().splitlines():
        if not line.startswith("#"):
            held = Requirement(line.partition("#")[0])
            assert line.partition("#")[2], f"{held}: why?"
            for python in PYTHONS:
                assert held.specifier.contains(pins(python, "linux")[canonicalize_name(held.name)][0])


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_an_environment_older_than_the_lock_is_updated(tmp_path):
    for name in ("Makefile", "pyproject.toml", ".ci/lock.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1000, 1000))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".ready").touch()

    def plan() -> str:
        return subprocess.run(["make", "-n", "test"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "pip install" not in plan()
    (tmp_path / ".ci" / "lock.txt").touch()
    os.utime(tmp_path / ".venv" / ".ready", (2000, 2000))
    assert re.search(r"pip install .*-c \.ci/lock\.txt -e '\.\[dev\]'", plan())


def test_ci_runs_one_script_on_every_python():
    job, = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == PYTHONS
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
