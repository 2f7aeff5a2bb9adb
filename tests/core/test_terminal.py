"""The progress bar on a pseudo-terminal: below the messages of this and other processes, at any width."""

import multiprocessing
import os
import sys
from contextlib import contextmanager

import pytest
from transformers import AddedToken

from lmmods.core import console, progress_bar
from lmmods.core.console import is_terminal, printable, say, shows_colour, tell
from lmmods.core.progress_bar import Bar
from lmmods.runs.inspect import mark_targets
from tests.screen import Screen


@pytest.fixture
def screen():
    screen = Screen(60)
    yield screen
    screen.close()


@contextmanager
def show_on(screen):
    """Redirect stdout and stderr to the screen. pytest sets both before each test."""
    with pytest.MonkeyPatch.context() as patch, screen.open() as out, screen.open() as err:
        patch.setenv("TERM", "xterm")
        patch.setattr(progress_bar, "STEPS_MEASURED", 10**9)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        yield
        assert (sys.stdout, sys.stderr) == (out, err) and not console.open_bars


def test_messages_are_printed_above_the_bar(screen):
    with show_on(screen):
        bar = Bar()
        bar.open("train", 1000, first="compiling")
        [line] = screen.look()
        assert line.startswith("train:   0%|") and line.endswith("| 0/1000, compiling") and len(line) == 59
        say("a sample")
        assert screen.look() == ["a sample", line]
        bar.update(250, "loss 1.5 (smoothed 2)")
        tell("a warning of two\nlines")
        os.write(sys.stderr.fileno(), b"W0000 of a library in C that is longer than the bar was here, and folded\n")
        bar.update(270, "loss 1.5 (smoothed 2)")
        *above, last = screen.look()
        assert above == ["a sample", "a warning of two", "lines",
                         "W0000 of a library in C that is longer than the bar was here", ", and folded"]
        assert last.startswith("train:  27%|") and "| 270/1000, 0:" in last and "left  loss 1.5 (smo" in last
        screen.resize(140)
        bar.update(280, "loss 1.4")
        *above, last = screen.look()
        assert "left  loss 1.4  memory " in last and last.endswith(" GiB") and len(last) == 139
        screen.resize(30)
        bar.update(290, "loss 1.3")
        assert screen.look()[:-1] == above
        assert screen.look()[-1].startswith("train:  29%|") and len(screen.look()[-1]) < 30
        screen.resize(0)  # a terminal that does not report its width
        bar.update(300, "loss 1.2")
        assert "| 300/1000, 0:" in screen.look()[-1] and len(screen.look()[-1]) == 79
        bar.close()
        say("the end")
        assert screen.look() == [*above, "the end"]


def test_a_bar_without_steps_shows_only_its_name(screen):
    with show_on(screen):
        screen.resize(0)
        bar = Bar()
        bar.open("validate", 0)
        assert screen.look() == ["validate"]
        bar.open("test", 4)  # replaces the other
        bar.update()
        assert len(screen.look()) == 1 and screen.look()[0].startswith("test:")
        bar.close()
        assert screen.look() == []


def say_in_worker(path):
    worker = multiprocessing.get_context("spawn").Process(target=say_into, args=(path,))
    worker.start()
    worker.join(60)


def say_into(path):
    with open(path, "w") as sys.stdout:
        say("a worker\nsays two lines")


def say_in_lightning_process(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
        patch.setattr(console, "open_bars", [])
        say("a worker\nsays two lines")


@pytest.mark.parametrize("print_lines", [say_in_worker, say_in_lightning_process])
def test_messages_of_another_process_replace_the_bar_until_the_next_step(screen, print_lines):
    with show_on(screen):
        bar = Bar()
        bar.open("train", 10)
        print_lines(screen.path)
        assert screen.look() == ["a worker", "says two lines"]
        bar.update(1, "loss 2")
        lines = screen.look()
        assert lines[:2] == ["a worker", "says two lines"] and lines[2].startswith("train:  10%|")
        bar.close()


def test_a_log_file_gets_progress_lines_despite_a_bar_on_stderr(screen, monkeypatch, tmp_path):
    with show_on(screen), open(tmp_path / "log", "w") as log, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", log)
        bar = Bar()
        bar.open("train", 100)
        bar.update(25, "loss 1")
        bar.close()
    assert (tmp_path / "log").read_text().startswith("step 25/100  loss 1  memory ")


def test_dumb_terminals_and_no_color_are_respected(screen, monkeypatch):
    with screen.open() as stream:
        for settings, has_cursor, has_colour in (({}, True, True), ({"TERM": "dumb"}, False, False),
                                                 ({"NO_COLOR": "1"}, True, False)):
            with monkeypatch.context() as patch:
                patch.setenv("TERM", "xterm")
                patch.delenv("NO_COLOR", raising=False)
                for name, value in settings.items():
                    patch.setenv(name, value)
                assert (is_terminal(stream), shows_colour(stream)) == (has_cursor, has_colour)


def test_rows_are_printed_with_marked_targets_and_no_control_characters():
    class Letters:
        added_tokens_decoder = {ord(token): AddedToken(token, special=token == "I") for token in "Iz"}

        def decode(self, ids):
            return "".join(map(chr, ids))

    ids = [*b"ask", *b"\x1b[2Jyes", *b"!"]
    labels = [-100] * 3 + ids[3:10] + [-100]
    assert mark_targets(Letters(), ids, labels, ("<", ">")) == "ask<␛[2Jyes>!"
    assert mark_targets(Letters(), [*b"IIIIIaIIIzzzz"], [-100] * 13, ("", "")) == "I×5aIIIzzzz"
    assert printable("a\x1b]0;title\x07") == "a␛]0;title\x07"
