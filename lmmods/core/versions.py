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
        tried: Tested versions, as in pyproject.toml; empty for any.
        extra: The extra that it belongs to; None if every run needs it.
    """

    name: str
    tried: str
    extra: str | None

    @property
    def installed(self) -> str | None:
        """The installed version, if any."""
        return _installed(self.name)

    @property
    def was_tried(self) -> bool:
        """True if the installed version is among the tested ones."""
        return self.installed is not None and SpecifierSet(self.tried).contains(self.installed, prereleases=True)


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
        """Read the metadata. A checkout's pyproject.toml wins: an editable installation keeps outdated metadata."""
        try:
            told = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        except (OSError, KeyError, tomllib.TOMLDecodeError):
            told = {}
        if told.get("name") == NAME:
            listed: list[tuple[str, str | None]] = [(line, None) for line in told["dependencies"]]
            listed += [(line, extra) for extra, lines in told["optional-dependencies"].items() for line in lines]
            return cls(told["version"], told["requires-python"], _dependencies(listed))
        found = metadata.metadata(NAME)
        extras = found.get_all("Provides-Extra") or []
        listed = [(line, extra) for line in found.get_all("Requires-Dist") or [] for extra in (None, *extras)
                  if (extra is None) == ("extra ==" not in line)]
        return cls(found["Version"], found["Requires-Python"], _dependencies(listed))


def _dependencies(listed: list[tuple[str, str | None]]) -> tuple[Dependency, ...]:
    """Dependencies for this Python and platform; `listed` has each requirement with the extra it may belong to."""
    found = []
    for line, extra in listed:
        wanted = Requirement(line)
        if wanted.name != NAME and (wanted.marker is None or wanted.marker.evaluate({"extra": extra or ""})):
            tried = ",".join(sorted(map(str, wanted.specifier), reverse=True))  # the lowest first
            found.append(Dependency(wanted.name, tried, extra))
    return tuple(found)


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
    declared = [each for each in Project.read().dependencies if each.extra != "dev"]
    compiled = Dependency("jaxlib", "", None)  # jax chooses it
    return {each.name: each.installed for each in (*declared, compiled) if each.installed is not None}


def code_version(root: Path = ROOT) -> dict[str, Any]:
    """Identify this code.

    Returns:
        `version`; `content`, a fingerprint of all source files; in a git checkout also `commit`, and `changed`, the
        files that differ from it.
    """
    found: dict[str, Any] = {"version": Project.read().version, "content": _content(root)}
    if (root / ".git").exists():
        found |= _git_state(root)
    return found


def _content(root: Path) -> str:
    files = [path for name in SOURCES for path in sorted((root / name).rglob("*.py")) or [root / name] if path.exists()]
    return fingerprints.combine_fingerprints(f"{path.relative_to(root)} {fingerprints.whole_file(path)}"
                                             for path in files)


def _git_state(root: Path) -> dict[str, Any]:
    """`commit` and `changed` from git; empty if git is missing or fails."""
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--no-renames", "--", *SOURCES]
    try:
        said = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=GIT_SECONDS, check=True,
                              env={**os.environ, "LC_ALL": "C"}).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    found: dict[str, Any] = {"commit": None, "changed": []}
    for line in said.splitlines():
        kind, _, rest = line.partition(" ")
        if rest.startswith("branch.oid "):
            found["commit"] = rest.split()[1]
        elif kind != "#":
            fields = {"1": 7, "u": 9, "?": 0}[kind]  # number of fields before the path
            found["changed"].append(rest.split(" ", fields)[fields])
    return found
