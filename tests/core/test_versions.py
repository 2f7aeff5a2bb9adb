"""The versions that `make` installs: a lock, within the ranges of pyproject.toml, for each Python that it names."""

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


def environment(python: str, system: str) -> dict[str, str]:
    return {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": system, "extra": "",
            "platform_system": SYSTEMS[system], "platform_machine": "x86_64",
            "os_name": "nt" if system == "win32" else "posix"}


def pins(python: str, system: str) -> dict[str, list[str]]:
    """The versions of each package by its normalised name."""
    found = {}
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate(environment(python, system)):
            version, = pin.specifier
            assert version.operator == "==" and "*" not in version.version, pin
            found.setdefault(canonicalize_name(pin.name), []).append(version.version)
    return found


def direct() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    all_of_them = [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]
    return [one for one in all_of_them if one.name != PROJECT["name"]]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_pins_every_dependency_within_its_range(python, system):
    locked = pins(python, system)
    assert all(len(versions) == 1 for versions in locked.values())
    for wanted in direct():
        if wanted.marker is None or wanted.marker.evaluate(environment(python, system)):
            assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)][0], prereleases=True), wanted


def test_the_lock_holds_what_dependencies_need():
    """A few that come at third hand, one of which differs between Pythons."""
    for python in PYTHONS:
        assert {"pyyaml", "huggingface-hub", "jaxlib", "pyarrow", "mpmath", "hjson"} <= set(pins(python, "linux"))
    assert pins("3.11", "linux")["jaxlib"] != pins("3.13", "linux")["jaxlib"]


def test_the_lock_names_no_host_and_lets_pip_choose_the_build():
    assert "://" not in LOCK and "--" not in re.sub("#.*", "", LOCK)
    assert "+" not in pins("3.11", "linux")["torch"][0]


def test_what_is_held_back_is_locked_so():
    for line in (ROOT / ".ci" / "hold.txt").read_text().splitlines():
        if not line.startswith("#"):
            held = Requirement(line.partition("#")[0])
            assert line.partition("#")[2], f"{held}: why?"
            for python in PYTHONS:
                assert held.specifier.contains(pins(python, "linux")[canonicalize_name(held.name)][0])


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_an_environment_older_than_the_lock_is_installed_into_again(tmp_path):
    for name in ("Makefile", "pyproject.toml", ".ci/lock.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1000, 1000))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".ready").touch()

    def planned() -> str:
        return subprocess.run(["make", "-n", "test"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "pip install" not in planned()
    (tmp_path / ".ci" / "lock.txt").touch()
    os.utime(tmp_path / ".venv" / ".ready", (2000, 2000))
    assert re.search(r"pip install .*-c \.ci/lock\.txt -e '\.\[dev\]'", planned())


def test_one_script_runs_on_every_python():
    job, = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == PYTHONS
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
