"""train.py starts by itself under `uv run`: the dependencies in its header (PEP 723) are those of the project."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_header_of_train_py_has_the_dependencies_of_the_project():
    text = (ROOT / "train.py").read_text()
    block, = re.findall(r"^# /// script$\n((?:^#(?: .*)?$\n)+?)^# ///$", text, re.M)  # the reference of PEP 723
    header = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert header == {key: project[key] for key in ("requires-python", "dependencies")}
