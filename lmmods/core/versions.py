"""Versions of this code, and of the tested and the installed libraries."""

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lmmods.core import fingerprints

NAME = "lmmods"
ROOT = Path(__file__).parents[2]  # of a checkout; site-packages if the project is installed
SOURCES = ("lmmods", "jax_engine", "train.py")
GIT_SECONDS = 10


@dataclass(frozen=True)
class Dependency:
    """A library that this project declares.

    Args:
        tested_versions: As in pyproject.toml; empty for any.
        extra: Extra that the library belongs to; None if every run needs it.
    """

    name: str
    tested_versions: str
    extra: str | None

    @property
    def installed(self) -> str | None:
        """The installed version, if any."""
        return _installed(self.name)

    @property
    def is_tested(self) -> bool:
        """True if the installed version is among the tested ones."""
        return self.installed is not None and SpecifierSet(self.tested_versions).contains(
            self.installed, prereleases=True)


@dataclass(frozen=True)
class Project:
    """Metadata of the project: pyproject.toml in a checkout, else the metadata of the installed package.

    Args:
        python: Tested versions of Python.
    """

    version: str
    python: str
    dependencies: tuple[Dependency, ...]

    @classmethod
    def read(cls, root: Path = ROOT) -> "Project":
        """Read the metadata. A checkout's pyproject.toml takes precedence: an editable install keeps outdated metadata.
        """
        try:
            project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        except (OSError, KeyError, tomllib.TOMLDecodeError):
            project = {}
        if project.get("name") == NAME:
            listed: list[tuple[str, str | None]] = [(line, None) for line in project["dependencies"]]
            listed += [(line, extra) for extra, lines in project["optional-dependencies"].items() for line in lines]
            return cls(project["version"], project["requires-python"], _dependencies(listed))
        installed = metadata.metadata(NAME)
        extras = installed.get_all("Provides-Extra") or []
        listed = [(line, extra) for line in installed.get_all("Requires-Dist") or [] for extra in (None, *extras)
                  if (extra is None) == ("extra ==" not in line)]
        return cls(installed["Version"], installed["Requires-Python"], _dependencies(listed))


def _dependencies(listed: list[tuple[str, str | None]]) -> tuple[Dependency, ...]:
    """Return the dependencies for this Python and platform.

    Args:
        listed: Requirements, each with the extra that it belongs to, if any.
    """
    dependencies = []
    for line, extra in listed:
        requirement = Requirement(line)
        marker = requirement.marker
        if requirement.name != NAME and (marker is None or marker.evaluate({"extra": extra or ""})):
            tested_versions = ",".join(sorted(map(str, requirement.specifier), reverse=True))  # the lowest first
            dependencies.append(Dependency(requirement.name, tested_versions, extra))
    return tuple(dependencies)


@cache  # imported libraries do not change during the process
def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def installed_packages() -> dict[str, str]:
    """Return the versions of the libraries that training may use and that are installed, by name."""
    declared = [library for library in Project.read().dependencies if library.extra != "dev"]
    compiled = Dependency("jaxlib", "", None)  # jax chooses it
    return {library.name: library.installed for library in (*declared, compiled) if library.installed is not None}


def code_version(root: Path = ROOT) -> dict[str, Any]:
    """Identify this code.

    Returns:
        `version`; `content`, a fingerprint of all source files; in a git checkout also `commit`, and `changed`, the
        files that differ from it.
    """
    version: dict[str, Any] = {"version": Project.read().version, "content": _content(root)}
    if (root / ".git").exists():
        version |= _git_state(root)
    return version


def _content(root: Path) -> str:
    files = [path for name in SOURCES for path in sorted((root / name).rglob("*.py")) or [root / name] if path.exists()]
    return fingerprints.combine_fingerprints(f"{path.relative_to(root)} {fingerprints.whole_file(path)}"
                                             for path in files)


def _git_state(root: Path) -> dict[str, Any]:
    """Return `commit` and `changed` from git; empty if git is missing or fails."""
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--no-renames", "--", *SOURCES]
    try:
        status = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=GIT_SECONDS, check=True,
                                env={**os.environ, "LC_ALL": "C"}).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    state: dict[str, Any] = {"commit": None, "changed": []}
    for line in status.splitlines():
        kind, _, rest = line.partition(" ")
        if rest.startswith("branch.oid "):
            state["commit"] = rest.split()[1]
        elif kind != "#":
            fields = {"1": 7, "u": 9, "?": 0}[kind]  # number of fields before the path
            state["changed"].append(rest.split(" ", fields)[fields])
    return state
