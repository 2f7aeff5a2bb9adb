"""The header of train.py (PEP 723): it starts by itself under `uv run`, and as a job of the Hugging Face hub."""

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
    block, = re.findall(r"^# /// script$\n((?:^#(?: .*)?$\n)+?)^# ///$", text, re.M)  # the reference of PEP 723
    return tomllib.loads(re.sub(r"^# ?", "", block, flags=re.M))


def test_it_has_the_dependencies_of_the_project(header):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert header == {key: project[key] for key in ("requires-python", "dependencies")} | {"tool": header["tool"]}


def test_the_hub_reads_it():
    hf = Path(sys.executable).with_name("hf")
    said = subprocess.run([hf, "jobs", "uv", "run", "--dry-run", "train.py", "fit", "--config", "configs/clm.yaml"],
                          cwd=ROOT, capture_output=True, text=True, check=True)
    assert "lmmods:/code/lmmods" in said.stdout + said.stderr and "PYTHONPATH=/code" in said.stdout + said.stderr


@pytest.mark.slow
def test_a_job_has_all_that_it_needs(header, recipe, tmp_path):
    """As the hub starts one: the script and files among its arguments in a folder, volumes mounted, another folder."""
    job = header["tool"]["hf-jobs"]
    for volume in job["volumes"]:
        source, target = volume.split(":")
        shutil.copytree(ROOT / source, tmp_path / target[1:], ignore=shutil.ignore_patterns("__pycache__"))
    config, path = recipe()
    data, here = tmp_path / "data", tmp_path / "here"
    data.mkdir()
    here.mkdir()
    for file in (ROOT / "train.py", path):
        shutil.copy(file, data)
    # Not the checkout: an interpreter that sees an installation of it by its finder would not use the copies.
    code = f"import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'lmmods' not in str(each)]; " \
           f"import runpy; sys.argv[0] = {str(data / 'train.py')!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    environment = {name: str(tmp_path / value[1:]) for name, value in job["env"].items()}
    subprocess.run([sys.executable, "-c", code, "fit", config, str(data / Path(path).name)], cwd=here, check=True,
                   env={"PATH": "/usr/bin:/bin", "HOME": str(here), **environment}, timeout=120)
    assert (tmp_path / "run" / "completed").exists()
