"""The fork server of the tests."""

import os
import sys

import pytest

from tests.forks import PRELOADED, Fork

pytestmark = pytest.mark.slow  # the server takes long to start


def print_state() -> None:
    missing = [name for name in PRELOADED if name not in sys.modules]
    print(missing, os.environ["SHOWN"])


def test_a_fork_has_the_preloaded_libraries_and_its_own_environment():
    process = Fork(print_state, SHOWN="here")
    assert process.communicate() == "[] here\n" and process.returncode == 0


def print_parent() -> None:
    print(os.getppid())


def print_own_and_childs_parent() -> None:
    grandchild_parent = Fork(print_parent).communicate()
    print(os.getppid(), grandchild_parent)


def test_a_fork_of_a_fork_comes_from_the_same_server():
    process = Fork(print_own_and_childs_parent)
    server, grandchild_server = process.communicate().split()
    assert server == grandchild_server and process.returncode == 0
