"""The header of train.py (PEP 723), with which it runs under `uv run` and as a Hugging Face job."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def header() -> dict:
    text = (ROOT / "train.py").read_text()
    block, = re.findall(r"^# /// script$\n((?:^#(?: .*)?$\n)+?)^# ///$", text, re.M)  # from PEP 723
    return tomllib.loads(re.sub(r"^# ?", "", block, flags=re.M))


def test_the_header_has_the_dependencies_of_the_project(header):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert header == {key: project[key] for key in ("requires-python", "dependencies")} | {"tool": header["tool"]}


def test_the_hugging_face_client_reads_the_header():
    hf = Path(sys.executable).with_name("hf")
    done = subprocess.run([hf, "jobs", "uv", "run", "--dry-run", "train.py", "fit", "--config", "configs/clm.yaml"],
                          cwd=ROOT, capture_output=True, text=True, check=True)
    assert "lmmods:/code/lmmods" in done.stdout + done.stderr and "PYTHONPATH=/code" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_hugging_face_job_trains_from_its_volumes(header, recipe, tmp_path):
    """As on the hub: script and file arguments in one folder, mounted volumes, another working directory."""
    job = header["tool"]["hf-jobs"]
    for volume in job["volumes"]:
        source, target = volume.split(":")
        shutil.copytree(ROOT / source, tmp_path / target[1:], ignore=shutil.ignore_patterns("__pycache__"))
    config, path = recipe()
    data, work_dir = tmp_path / "data", tmp_path / "here"
    data.mkdir()
    work_dir.mkdir()
    for file in (ROOT / "train.py", path):
        shutil.copy(file, data)
    # Remove the finder of an editable installation, which would import the checkout instead of the copies.
    code = f"import sys; sys.meta_path[:] = [finder for finder in sys.meta_path if 'lmmods' not in str(finder)]; " \
           f"import runpy; sys.argv[0] = {str(data / 'train.py')!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    environment = {name: str(tmp_path / value[1:]) for name, value in job["env"].items()}
    subprocess.run([sys.executable, "-c", code, "fit", config, str(data / Path(path).name)], cwd=work_dir, check=True,
                   env={"PATH": "/usr/bin:/bin", "HOME": str(work_dir), **environment}, timeout=120)
    assert (tmp_path / "run" / "completed").exists()
