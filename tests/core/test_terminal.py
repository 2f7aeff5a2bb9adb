"""The status line on a pseudo-terminal: below all that is printed, by whom ever, at any width."""

import os
import sys
from contextlib import contextmanager

import pytest

from lmmods.core import progress_bar
from lmmods.core.console import printable, say
from lmmods.core.progress_bar import Above, Bar, StatusLine, shows_colour
from lmmods.runs.inspect import marked_text
from tests.screen import Screen


@pytest.fixture
def screen():
    screen = Screen(60)
    yield screen
    screen.close()


@contextmanager
def on(screen):
    """stdout and stderr of this process are on the screen, with a status line. pytest sets both before each test."""
    with pytest.MonkeyPatch.context() as patch, screen.open() as out, screen.open() as err:
        patch.setenv("TERM", "xterm")
        patch.setattr(progress_bar, "_line", None)
        patch.setattr(progress_bar, "REDRAWN", 0.0)
        patch.setattr(progress_bar, "STEPS_MEASURED", 10**9)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        progress_bar.keep_last_line()
        yield sys.stdout, sys.stderr


def test_nothing_breaks_the_line_of_the_bar(screen):
    with on(screen) as (out, err):
        out.write("\rof tqdm\r       \r")
        out.write("loading ...")
        bar = Bar()
        bar.open("train", 1000, first="compiling")
        assert screen.look() == ["loading ...", "train   0% 0/1000 [--------------------]  compiling"]
        bar.update(250, "loss 1.5 (smoothed 2)")
        say("a sample")
        out.write("half a ")
        bar.update(260)
        out.write("line\n")
        err.write("a warning of two\nlines\n")
        os.write(err.fileno(), b"W0000 of a library in C that is longer than the bar was here, and folded\n")
        bar.update(270)
        *above, last = screen.look()
        assert above == ["loading ...", "a sample", "half a line", "a warning of two", "lines",
                         "W0000 of a library in C that is longer than the bar was here", ", and folded"]
        assert last.startswith("train  27% 270/1000  0:") and "left  loss 1.5 (smoothed 2)" in last
        screen.resize(30)
        bar.update(280)
        assert screen.look()[-1].startswith("train  28% 280/1000  0:") and len(screen.look()[-1]) < 30
        screen.resize(0)  # a terminal that does not say
        bar.update(290)
        bar.close()
        say("the end")
        assert screen.look() == [*above, "the end"]


def test_a_process_beside_it_replaces_the_line_by_its_own(screen):
    with on(screen), screen.open() as stream:
        bar = Bar()
        bar.open("train", 10)
        worker = Above(stream, StatusLine(stream, erases=True))
        print("a worker\nsays two lines", file=worker)
        assert screen.look() == ["a worker", "says two lines"]
        bar.update(1)
    assert screen.look()[:2] == ["a worker", "says two lines"] and screen.look()[2].startswith("train  10% 1/10")


def test_a_log_file_gets_lines_also_beside_a_bar(screen, monkeypatch, tmp_path):
    with on(screen), open(tmp_path / "log", "w") as log, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", log)
        bar = Bar()
        bar.open("train", 100)
        bar.update(25, "loss 1")
        bar.close()
    assert (tmp_path / "log").read_text().startswith("step 25/100  loss 1  memory ")


def test_dumb_terminals_and_those_without_colour(screen, monkeypatch):
    with screen.open() as stream:
        for settings, moves, colours in (({}, True, True), ({"TERM": "dumb"}, False, False),
                                         ({"NO_COLOR": "1"}, True, False)):
            with monkeypatch.context() as patch:
                patch.setenv("TERM", "xterm")
                patch.delenv("NO_COLOR", raising=False)
                for name, value in settings.items():
                    patch.setenv(name, value)
                assert (progress_bar.is_terminal(stream), shows_colour(stream)) == (moves, colours)


def test_rows_are_marked_and_command_no_terminal():
    class Letters:
        def decode(self, ids):
            return "".join(map(chr, ids))

    ids = [*b"ask", *b"\x1b[2Jyes", *b"!"]
    labels = [-100] * 3 + ids[3:10] + [-100]
    assert marked_text(Letters(), ids, labels, ("<", ">")) == "ask<␛[2Jyes>!"
    assert printable("a\x1b]0;title\x07") == "a␛]0;title\x07"
