"""How torch's threads wait: asleep next to other busy programs, unless the user chose otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmmods.core.hardware import num_cores
from lmmods.core.waiting import CHOSEN_BY, SECONDS, busy_cores

ROOT = Path(__file__).parents[2]
CHOOSE = """
import os, sys
from lmmods.core.hardware import num_cores
from lmmods.core.waiting import sleep_if_busy
line = sleep_if_busy()
assert "torch" not in sys.modules
print(line is not None, os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.fixture
def busy_programs():
    """Run one busy program per usable core during the test."""
    command = [sys.executable, "-c", "import time\nend = time.time() + 60\nwhile time.time() < end: pass"]
    programs = [subprocess.Popen(command) for _ in range(num_cores())]
    yield
    for program in programs:
        program.kill()
        program.wait()


def choose(**environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name not in (*CHOSEN_BY, "LOCAL_RANK")}
    return subprocess.run([sys.executable, "-c", CHOOSE], cwd=ROOT, env={**inherited, **environment}, check=True,
                          capture_output=True, text=True).stdout.strip()


def test_threads_sleep_next_to_busy_programs(busy_programs):
    assert choose() == "True PASSIVE"


@pytest.mark.parametrize(("name", "value"), [
    ("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "1000"), ("OMP_NUM_THREADS", "1"), ("LOCAL_RANK", "0")])
def test_settings_of_the_user_or_a_launcher_take_precedence(name, value, busy_programs):
    assert choose(**{name: value}) == f"False {value if name == 'OMP_WAIT_POLICY' else None}"


def test_the_number_of_busy_cores_is_measured(busy_programs):
    """All cores are busy now, and never more than exist; the system clock ticks every 10 ms."""
    cores = num_cores()
    assert cores / 2 < busy_cores(5 * SECONDS) < cores * 1.1
