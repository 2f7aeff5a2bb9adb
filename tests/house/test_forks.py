"""The server that tests fork processes from."""

import os
import sys

import pytest

from tests.forks import PRELOADED, Fork

pytestmark = pytest.mark.slow  # as is the start of a server


def show() -> None:
    missing = [name for name in PRELOADED if name not in sys.modules]
    print(missing, os.environ["SHOWN"])


def test_a_fork_finds_the_libraries_loaded_and_has_an_environment_of_its_own():
    process = Fork(show, SHOWN="here")
    assert process.communicate() == "[] here\n" and process.returncode == 0


def grandchild() -> None:
    print(os.getppid())


def child() -> None:
    said = Fork(grandchild).communicate()
    print(os.getppid(), said)


def test_what_a_fork_starts_is_a_fork_of_the_same_server():
    process = Fork(child)
    server, of_the_second = process.communicate().split()
    assert server == of_the_second and process.returncode == 0
