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
        for begin, part in ((f"{kind:<{INDENT}}", text), (" " * INDENT + "-> ", remedy)):
            if part:
                say(textwrap.fill(part, self.width, initial_indent=begin, subsequent_indent=" " * len(begin),
                                  break_long_words=False, break_on_hyphens=False))


PROBES = {"torch": "lmmods.torch_engine.probe", "jax": "jax_engine.probe"}
PROBE_SECONDS = 60  # allows for a busy machine; otherwise a few suffice
LITTLE_DISK, NO_DISK, LITTLE_SHARED = 10 * 2**30, 2**30, 2**30  # bytes
LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_JOB_ID")


def doctor() -> None:
    """Say what works on this machine and what does not.

    Each line is ok, a note, or a problem with what to do. The status is 0 where a run could start, else 2.
    Nothing leaves this machine.

    Raises:
        UserError: There is a problem.
    """
    probes = {engine: _Probe(module) for engine, module in PROBES.items()}  # run in the background meanwhile
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
        self._said = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen([sys.executable, "-m", module], stdout=subprocess.PIPE, stderr=self._said,
                                         stdin=subprocess.DEVNULL, text=True, env=environment)

    def answer(self) -> dict[str, Any] | str:
        """Return the probe's result, or the reason why there is none."""
        try:
            out, _ = self._process.communicate(timeout=PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return f"it has not answered within {PROBE_SECONDS} seconds"
        self._said.seek(0)
        lines = self._said.read().strip().splitlines()
        self._said.close()
        if self._process.returncode:
            return f"{lines[-1] if lines else 'it said nothing'} (status {self._process.returncode})"
        return json.loads(out.splitlines()[-1])


# Code and libraries ---------------------------------------------------------------------------------------------------


def _check_code(findings: Findings) -> None:
    code = code_version()
    commit = f", commit {code['commit'][:10]}" if code.get("commit") else ""
    findings.add("ok", f"lmmods {code['version']}{commit} in {ROOT}")
    if code.get("changed"):
        findings.add("note", f"{len(code['changed'])} files of the code are not as in that commit: "
                             f"{', '.join(code['changed'][:5])}{', …' if len(code['changed']) > 5 else ''}")


def check_versions(project: Project, findings: Findings) -> None:
    """Check Python and library versions against those the project was tested with."""
    python = SpecifierSet(project.python).contains(python_version())
    findings.add("ok" if python else "problem", f"Python {python_version()}; tried are {project.python}",
                 "" if python else "make the environment with one of these: make install PYTHON=python3.12")
    needed = [each for each in project.dependencies if each.extra is None]
    for each in needed:
        if each.installed is None:
            findings.add("problem", f"{each.name} is not installed", "pip install -e .")
    for each in project.dependencies:
        if each.installed is not None and not each.was_tried and each.extra != "dev":
            findings.add("note", f"{each.name} {each.installed} was never tried with this version, only {each.tried}",
                         f"pip install '{each.name}{each.tried}'")
    tried = [f"{each.name} {each.installed}" for each in needed if each.was_tried]
    findings.add("ok", f"{len(tried)} of {len(needed)} libraries are of versions that were tried: {', '.join(tried)}")
    extras = {each.extra: each.installed is not None for each in project.dependencies
              if each.extra not in (None, "dev", "cuda")}
    absent = [name for name, there in extras.items() if not there]
    if absent:
        findings.add("ok", f"extras not installed: {', '.join(absent)}; needed for what they are called after only: "
                           f"pip install -e '.[{','.join(absent)}]'")


# Devices --------------------------------------------------------------------------------------------------------------


def _check_memory(findings: Findings) -> None:
    import psutil

    memory, limit = psutil.virtual_memory(), memory_limit()
    limited = f", of which this container may use {_size(limit)}" if limit and limit < memory.total else ""
    findings.add("ok", f"CPU {processor()}, {num_cores()} cores, {_size(memory.available)} of {_size(memory.total)} "
                       f"memory free{limited}")
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < LITTLE_SHARED:
        findings.add("note", f"/dev/shm has {_size(free)} free, through which data.num_workers hand over batches",
                     "leave data.num_workers at 0, or start the container with --shm-size 8g")


def check_torch(found: dict[str, Any] | str, findings: Findings) -> None:
    """Report the probe of the torch engine."""
    if isinstance(found, str):
        return findings.add("problem", f"engine torch: {found}", "python -m lmmods.torch_engine.probe says all; where "
                            "it hangs or crashes, a driver or a library of CUDA is broken, as a rule (nvidia-smi)")
    findings.add("ok", f"torch {found['version']}, {found['threads']} threads; precision auto is "
                       f"{found['precision'][0]}: {found['precision'][1]}")
    for number, gpu in enumerate(found["gpus"]):
        findings.add("ok", f"GPU {number}: {gpu['name']}, {_size(gpu['free'])} of {_size(gpu['total'])} free")
    if not found["gpus"]:
        if not Path("/dev/nvidia0").exists():
            findings.add("ok", "no GPU: runs use the CPU")
        elif found["cuda"] is None:
            findings.add("problem", "there is an NVIDIA GPU, but this torch is built for CPUs",
                         "install torch's CUDA build, with the command that its install page gives")
        else:
            findings.add("problem", f"there is an NVIDIA GPU that torch (CUDA {found['cuda']}) cannot use",
                         "nvidia-smi; a driver older than this CUDA, or CUDA_VISIBLE_DEVICES, as a rule")
    _check_kernels(found["kernels"], findings)
    if found["met"]:
        findings.add("problem", f"two processes of this machine cannot meet over a port: {found['met']}",
                     "one device works; for several, let processes listen on 127.0.0.1 (firewall, sandbox, "
                     "GLOO_SOCKET_IFNAME)")
    else:
        nccl = "; GPUs talk over NCCL" if found["nccl"] and found["gpus"] else ""
        findings.add("ok", f"two processes of this machine meet over a port and sum a number{nccl}")
    if launched := [f"{name}={os.environ[name]}" for name in LAUNCHED if name in os.environ]:
        findings.add("note", f"a launcher's variables are set: {' '.join(launched)}",
                     "a run that is started here joins the processes that they name; unset them to train alone")


def _check_kernels(kernels: dict[str, dict[str, str]], findings: Findings) -> None:
    for device, by_name in kernels.items():
        if working := [name for name, wrong in by_name.items() if not wrong]:
            findings.add("ok", f"bitsandbytes on {device}: {', '.join(working)} multiply as what they stand for")
        for name, wrong in by_name.items():
            if wrong:
                findings.add("problem", f"bitsandbytes on {device}: {name} does not work: {wrong}",
                             f"runs without model.quantize {name} work; else pip install -e ., or a CUDA that "
                             "python -m bitsandbytes finds")


def check_jax(found: dict[str, Any] | str, findings: Findings) -> None:
    """Report the probe of the JAX engine."""
    if isinstance(found, str):
        return findings.add("problem", f"engine jax: {found}", "python -m jax_engine.probe says all; jax and flax move "
                            "in pairs: pip install -e . (with [cuda] for NVIDIA GPUs)")
    devices = ", ".join(f"{count} x {kind}" for kind, count in Counter(found["devices"]).items())
    findings.add("ok", f"jax {found['version']} with flax {found['flax']} on {found['platform']}: {devices}; precision "
                       f"auto is {found['precision'][0]}: {found['precision'][1]}")
    if found["platform"] == "cpu" and Path("/dev/nvidia0").exists():
        findings.add("note", "there is an NVIDIA GPU that JAX does not use", "pip install -e '.[cuda]'")
    for device, wrong in found["products"].items():
        if wrong:
            findings.add("problem", f"jax on {device}: {wrong}", "another driver, or another jax, as a rule")


# Disks and caches -----------------------------------------------------------------------------------------------------


def _check_disks(findings: Findings) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    places = {"the working directory": Path.cwd(), "temporary files": Path(tempfile.gettempdir()),
              "the cache": cache_folder(), "the hub's cache": Path(HF_HUB_CACHE)}
    for name, path in places.items():
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not os.access(there, os.W_OK):
            findings.add("problem", f"{name}: {there} cannot be written", _OTHER_PLACE.get(name, "change its rights"))
            continue
        free = shutil.disk_usage(there).free
        kind = "ok" if free >= LITTLE_DISK else "note" if free >= NO_DISK else "problem"
        findings.add(kind, f"{name}: {path}, {_size(free)} free", "" if kind == "ok" else
                     _OTHER_PLACE.get(name, "make room: checkpoints hold weights and optimiser state"))


_OTHER_PLACE = {"the cache": "set LMMODS_CACHE to another folder", "the hub's cache": "set HF_HOME to another folder",
                "temporary files": "set TMPDIR to another folder"}


def _check_cache(findings: Findings) -> None:
    """Report the size of the cache and how to clear it, by name, as its folder may have files of others."""
    root = cache_folder()
    folders = [path.parent for kind in ("*data", REFERENCE) for path in root.glob(f"{kind}-*/manifest.json")]
    patterns = [f"{kind}-*" for kind in sorted({folder.name.rsplit("-", 1)[0] for folder in folders})]
    patterns += [COMPILED] if (root / COMPILED).is_dir() else []
    if not patterns:
        return findings.add("ok", "the cache is empty")
    size = 0
    for file in (file for pattern in patterns for file in root.glob(f"{pattern}/**/*")):
        with suppress(FileNotFoundError):  # replaced by a run in the meantime
            size += file.lstat().st_size
    findings.add("ok", f"the cache has {_size(size)}, all of which is made again when it is needed. To clear it while "
                       f"no run is under way: rm -r {' '.join(str(root / pattern) for pattern in patterns)}")


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"


# Hub and W&B ----------------------------------------------------------------------------------------------------------


def _check_accounts(findings: Findings) -> None:
    """Report the hub and W&B accounts in the environment; of secrets only their presence."""
    from huggingface_hub import get_token

    from lmmods.runs.wandb import has_wandb_key

    offline = hub.offline_by()
    token = "a token is set" if get_token() else \
        "no token, so gated and private repositories are out of reach (hf auth login)"
    findings.add("ok", f"hub: {f'offline ({offline})' if offline else 'online'}; {token}"
                       + (f"; HF_ENDPOINT is {redact(os.environ['HF_ENDPOINT'])}" if os.environ.get("HF_ENDPOINT")
                          else ""))
    mode = os.environ.get("WANDB_MODE")
    key = "an API key is set" if has_wandb_key() else "no API key, so runs are kept offline (wandb login)"
    findings.add("ok", f"W&B: {f'WANDB_MODE is {redact(mode)}; ' if mode else ''}{key}")
