"""`doctor`: report what works on this machine and what does not, as plain text."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

from lmmods.core import hub
from lmmods.core.console import say
from lmmods.core.errors import UserError
from lmmods.core.hardware import COMPILED, REFERENCE, cache_folder, memory_limit, num_cores, processor
from lmmods.core.redaction import redact
from lmmods.core.versions import ROOT, Project, code_version, python_version

# ---------------------------------------------------------------------------------------------------------------------
# Findings of `verify` and `doctor`: printed as they occur, and counted.

INDENT = 9  # columns before the text


@dataclass
class Findings:
    """Printer of findings; `problems` collects the texts of the problems."""

    width: int = 120
    problems: list[str] = field(default_factory=list)

    def add(self, kind: Literal["ok", "note", "problem"], text: str, remedy: str = "") -> None:
        """Print a finding, with its remedy below."""
        if kind == "problem":
            self.problems.append(text)
        for prefix, words in ((f"{kind:<{INDENT}}", text), (" " * INDENT + "-> ", remedy)):
            if words:
                say(textwrap.fill(words, self.width, initial_indent=prefix, subsequent_indent=" " * len(prefix),
                                  break_long_words=False, break_on_hyphens=False))


PROBES = {"torch": "lmmods.torch_engine.probe", "jax": "jax_engine.probe"}
PROBE_SECONDS = 60  # allows for a busy machine; otherwise a few suffice
LITTLE_DISK, NO_DISK, LITTLE_SHARED = 10 * 2**30, 2**30, 2**30  # bytes
LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_JOB_ID")


def doctor() -> None:
    """Check this machine: versions, devices, kernels, disk, accounts.

    Each line is ok, a note, or a problem with its remedy. The exit status is 0 if a run could start, otherwise 2.
    Nothing leaves this machine.

    Raises:
        UserError: There is a problem.
    """
    probes = {engine: _Probe(module) for engine, module in PROBES.items()}  # start now, to run in the background
    findings = Findings()
    _check_code(findings)
    check_versions(Project.read(), findings)
    _check_memory(findings)
    check_torch(probes["torch"].answer(), findings)
    check_jax(probes["jax"].answer(), findings)
    _check_disks(findings)
    _check_cache(findings)
    _check_accounts(findings)
    if findings.problems:
        count = len(findings.problems)
        raise UserError(f"{count} problem{'s' if count > 1 else ''}, see above.")


class _Probe:
    """Background process in which an engine probes the devices."""

    def __init__(self, module: str):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # JAX would preallocate most of the GPU's memory, which torch probes at the same time.
        environment = {**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                       "TF_CPP_MIN_LOG_LEVEL": "3"}
        self._stderr = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen([sys.executable, "-m", module], stdout=subprocess.PIPE, stderr=self._stderr,
                                         stdin=subprocess.DEVNULL, text=True, env=environment)

    def answer(self) -> dict[str, Any] | str:
        """Return the probe's result, or the reason why there is none."""
        try:
            out, _ = self._process.communicate(timeout=PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return f"no answer within {PROBE_SECONDS} seconds"
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        self._stderr.close()
        if self._process.returncode:
            return f"{lines[-1] if lines else 'it printed nothing'} (status {self._process.returncode})"
        return json.loads(out.splitlines()[-1])


# Code and libraries ---------------------------------------------------------------------------------------------------


def _check_code(findings: Findings) -> None:
    code = code_version()
    commit = f", commit {code['commit'][:10]}" if code.get("commit") else ""
    findings.add("ok", f"lmmods {code['version']}{commit} in {ROOT}")
    if code.get("changed"):
        findings.add("note", f"{len(code['changed'])} code files differ from that commit: "
                             f"{', '.join(code['changed'][:5])}{', …' if len(code['changed']) > 5 else ''}")


def check_versions(project: Project, findings: Findings) -> None:
    """Check Python and library versions against those the project was tested with."""
    is_tested = SpecifierSet(project.python).contains(python_version())
    findings.add("ok" if is_tested else "problem", f"Python {python_version()} (tested: {project.python})",
                 "" if is_tested else "recreate the environment with a tested one: make install PYTHON=python3.12")
    needed = [dependency for dependency in project.dependencies if dependency.extra is None]
    for dependency in needed:
        if dependency.installed is None:
            findings.add("problem", f"{dependency.name} is not installed", "pip install -e .")
    for dependency in project.dependencies:
        if dependency.installed is not None and not dependency.is_tested and dependency.extra != "dev":
            findings.add("note", f"{dependency.name} {dependency.installed} is not tested, only "
                         f"{dependency.tested_versions}",
                         f"pip install '{dependency.name}{dependency.tested_versions}'")
    tested = [f"{dependency.name} {dependency.installed}" for dependency in needed if dependency.is_tested]
    findings.add("ok", f"{len(tested)} of {len(needed)} libraries have a tested version: {', '.join(tested)}")
    extras = {dependency.extra: dependency.installed is not None for dependency in project.dependencies
              if dependency.extra not in (None, "dev", "cuda")}
    absent = [name for name, is_installed in extras.items() if not is_installed]
    if absent:
        findings.add("ok", f"extras not installed: {', '.join(absent)}; each is only needed for what its name says: "
                           f"pip install -e '.[{','.join(absent)}]'")


# Devices --------------------------------------------------------------------------------------------------------------


def _check_memory(findings: Findings) -> None:
    import psutil

    memory, limit = psutil.virtual_memory(), memory_limit()
    free, total = _format_size(memory.available), _format_size(memory.total)
    restriction = f"; this container may use {_format_size(limit)}" if limit and limit < memory.total else ""
    findings.add("ok", f"CPU {processor()}, {num_cores()} cores, {free} of {total} memory free{restriction}")
    shared = Path("/dev/shm")
    if shared.is_dir() and (shared_free := shutil.disk_usage(shared).free) < LITTLE_SHARED:
        findings.add("note", f"/dev/shm has {_format_size(shared_free)} free; with data.num_workers, batches pass "
                             "through it",
                     "set data.num_workers to 0, or start the container with --shm-size 8g")


def check_torch(probe: dict[str, Any] | str, findings: Findings) -> None:
    """Report the probe of the torch engine."""
    if isinstance(probe, str):
        return findings.add("problem", f"engine torch: {probe}", "run python -m lmmods.torch_engine.probe for details; "
                            "if it hangs or crashes, a driver or CUDA library is usually broken (nvidia-smi)")
    findings.add("ok", f"torch {probe['version']}, {probe['threads']} threads; precision auto is "
                       f"{probe['precision'][0]}: {probe['precision'][1]}")
    for index, gpu in enumerate(probe["gpus"]):
        free, total = _format_size(gpu["free"]), _format_size(gpu["total"])
        findings.add("ok", f"GPU {index}: {gpu['name']}, {free} of {total} free")
    if not probe["gpus"]:
        if not Path("/dev/nvidia0").exists():
            findings.add("ok", "no GPU: runs use the CPU")
        elif probe["cuda"] is None:
            findings.add("problem", "there is an NVIDIA GPU, but this torch is built for CPUs",
                         "install torch's CUDA build with the command from its install page")
        else:
            findings.add("problem", f"there is an NVIDIA GPU that torch (CUDA {probe['cuda']}) cannot use",
                         "run nvidia-smi; usually the driver is older than this CUDA, or CUDA_VISIBLE_DEVICES hides it")
    _check_kernels(probe["kernels"], findings)
    if probe["met"]:
        findings.add("problem", f"two processes on this machine cannot connect over a port: {probe['met']}",
                     "train on one device; for several, let processes listen on 127.0.0.1 (firewall, sandbox, "
                     "GLOO_SOCKET_IFNAME)")
    else:
        nccl = "; GPUs communicate over NCCL" if probe["nccl"] and probe["gpus"] else ""
        findings.add("ok", f"two processes on this machine connect over a port and sum a number{nccl}")
    if variables := [f"{name}={os.environ[name]}" for name in LAUNCHED if name in os.environ]:
        findings.add("note", f"a launcher's variables are set: {' '.join(variables)}",
                     "unset them to train alone; with them, a run joins the processes that they name")


def _check_kernels(kernels: dict[str, dict[str, str]], findings: Findings) -> None:
    for device, by_name in kernels.items():
        if working := [name for name, problem in by_name.items() if not problem]:
            findings.add("ok", f"bitsandbytes on {device}: {', '.join(working)} multiply correctly")
        for name, problem in by_name.items():
            if problem:
                findings.add("problem", f"bitsandbytes on {device}: {name} does not work: {problem}",
                             f"train without model.quantize {name}, reinstall with pip install -e ., or install a CUDA "
                             "that python -m bitsandbytes finds")


def check_jax(probe: dict[str, Any] | str, findings: Findings) -> None:
    """Report the probe of the JAX engine."""
    if isinstance(probe, str):
        return findings.add("problem", f"engine jax: {probe}", "run python -m jax_engine.probe for details; jax and "
                            "flax need matching versions: pip install -e . (with [cuda] for NVIDIA GPUs)")
    devices = ", ".join(f"{count} x {name}" for name, count in Counter(probe["devices"]).items())
    findings.add("ok", f"jax {probe['version']} with flax {probe['flax']} on {probe['platform']}: {devices}; precision "
                       f"auto is {probe['precision'][0]}: {probe['precision'][1]}")
    if probe["platform"] == "cpu" and Path("/dev/nvidia0").exists():
        findings.add("note", "there is an NVIDIA GPU that JAX does not use", "pip install -e '.[cuda]'")
    for device, problem in probe["products"].items():
        if problem:
            findings.add("problem", f"jax on {device}: {problem}", "install another driver or another jax version")


# Disks and caches -----------------------------------------------------------------------------------------------------


def _check_disks(findings: Findings) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = {"the working directory": Path.cwd(), "temporary files": Path(tempfile.gettempdir()),
               "the cache": cache_folder(), "the hub's cache": Path(HF_HUB_CACHE)}
    for name, path in folders.items():
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not os.access(existing, os.W_OK):
            findings.add("problem", f"{name}: {existing} cannot be written",
                         _ALTERNATIVES.get(name, "change its permissions"))
            continue
        free = shutil.disk_usage(existing).free
        kind = "ok" if free >= LITTLE_DISK else "note" if free >= NO_DISK else "problem"
        findings.add(kind, f"{name}: {path}, {_format_size(free)} free", "" if kind == "ok" else
                     _ALTERNATIVES.get(name, "free some space: checkpoints store weights and optimiser state"))


_ALTERNATIVES = {"the cache": "set LMMODS_CACHE to another folder", "the hub's cache": "set HF_HOME to another folder",
                 "temporary files": "set TMPDIR to another folder"}


def _check_cache(findings: Findings) -> None:
    """Report the size of the cache and how to clear it, by name, as its folder may contain other files."""
    root = cache_folder()
    folders = [path.parent for name in ("*data", REFERENCE) for path in root.glob(f"{name}-*/manifest.json")]
    patterns = [f"{name}-*" for name in sorted({folder.name.rsplit("-", 1)[0] for folder in folders})]
    patterns += [COMPILED] if (root / COMPILED).is_dir() else []
    if not patterns:
        return findings.add("ok", "the cache is empty")
    size = 0
    for file in (file for pattern in patterns for file in root.glob(f"{pattern}/**/*")):
        with suppress(FileNotFoundError):  # replaced by a run in the meantime
            size += file.lstat().st_size
    findings.add("ok", f"the cache has {_format_size(size)}, which runs rebuild when needed. To clear it while no run "
                       f"is active: rm -r {' '.join(str(root / pattern) for pattern in patterns)}")


def _format_size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"


# Hub and W&B ----------------------------------------------------------------------------------------------------------


def _check_accounts(findings: Findings) -> None:
    """Report the hub and W&B accounts in the environment; secrets only by their presence."""
    from huggingface_hub import get_token

    from lmmods.runs.wandb import has_wandb_key

    offline = hub.offline_by()
    token = "a token is set" if get_token() else \
        "no token, so gated and private repositories are not accessible (hf auth login)"
    findings.add("ok", f"hub: {f'offline ({offline})' if offline else 'online'}; {token}"
                       + (f"; HF_ENDPOINT is {redact(os.environ['HF_ENDPOINT'])}" if os.environ.get("HF_ENDPOINT")
                          else ""))
    mode = os.environ.get("WANDB_MODE")
    key = "an API key is set" if has_wandb_key() else "no API key, so runs stay offline (wandb login)"
    findings.add("ok", f"W&B: {f'WANDB_MODE is {redact(mode)}; ' if mode else ''}{key}")
