"""Rewards that hang, crash or lie: bad answers get no reward but a reason, others are scored, no process is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from lmmods.core.errors import UserError
from lmmods.recipe.rewards import read_rewards
from lmmods.recipe.trust import ForeignCode, trusting
from lmmods.rollouts.rewards import RewardInput, Rewards

HOSTILE = "tests.rollouts.hostile_rewards"
ROOT = Path(__file__).parents[2]


def make_inputs(*texts: str) -> list[RewardInput]:
    return [RewardInput("p", text, [1] * len(text), {}, None, True) for text in texts]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def all_end(pids: list[int], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while (remaining := list(filter(is_alive, pids))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not remaining


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """Return a function that lists the processes recorded by rewards; all of them must end."""
    file = tmp_path / "pids"
    monkeypatch.setenv("HOSTILE_PIDS", str(file))
    monkeypatch.setenv("HOSTILE_HOME", os.getcwd())
    return lambda: list(map(int, file.read_text().split())) if file.exists() else []


@pytest.fixture
def rewards_of(noted):
    """Return a function that makes rewards from functions; after the test, none of their processes may be left."""
    created = []

    def make(*names: str, timeout: float = 30, **options) -> Rewards:
        with trusting(True):
            created.append(Rewards(read_rewards([{"function": f"{HOSTILE}.{name}", **options} for name in names]),
                                   timeout, 1))
        return created[-1]

    yield make
    for rewards in created:
        pids = rewards.pids
        rewards.close()
        assert all_end([*pids, *noted()])


def score(rewards: Rewards, *texts: str) -> tuple[list[float | None], list[str | None]]:
    """Return the values and reasons of the first reward."""
    values, reasons = rewards.score(make_inputs(*texts))
    return ([None if np.isnan(value) else float(value) for value in values[:, 0]],
            [answer_reasons.get(rewards.names[0]) for answer_reasons in reasons])


@pytest.mark.parametrize(("word", "reason"), [
    ("exits", "ended its process with status 3"),
    ("leaves", "SystemExit: gone"),
    ("faults", "ended its process by signal 11 (Segmentation fault)"),
    ("kills", "ended its process by signal 9 (Killed)"),
    ("eats", "took more than 4 GiB of memory"),
    ("raises", "LookupError: no such word"),
    ("closes", "ended its process with status 1"),
    ("forks-and-exits", "ended its process with status 4"),
])
def test_only_the_bad_answer_gets_no_reward(rewards_of, word, reason):
    rewards = rewards_of("length")
    assert score(rewards, "a", word, "four") == ([1, None, 4], [None, reason, None])
    assert score(rewards, "five!", "a") == ([5, 1], [None, None])


@pytest.mark.parametrize(("word", "reason"), [
    ("sleeps", "took longer than 1 s"), ("matches", "took longer than 1 s"),
    ("closes-and-sleeps", "closed the connection to the trainer")])
def test_a_reward_that_hangs_is_killed(rewards_of, word, reason):
    rewards = rewards_of("length", timeout=1)
    start = time.monotonic()
    assert score(rewards, word) == ([None], [reason])
    assert time.monotonic() - start < 4
    assert score(rewards, "four") == ([4], [None])


@pytest.mark.slow
def test_the_time_limit_grows_with_the_number_of_answers(rewards_of):
    rewards = rewards_of("length", timeout=1)
    start = time.monotonic()
    assert score(rewards, "a", "sleeps", "four") == ([1, None, 4], [None, "took longer than 1 s", None])
    assert time.monotonic() - start > 3


def test_values_that_are_not_numbers_are_no_rewards(rewards_of):
    values, reasons = score(rewards_of("values"), "nan", "inf", "none", "text", "huge", "list", "true", "negative", "")
    assert values == [None, None, None, None, None, None, 1, -2, 1]
    assert reasons == ["returned nan", "returned inf", None, "returned '1.0', which is not a number", "returned 1e+300",
                       "returned list, which is not a number", None, None, None]


@pytest.mark.parametrize(("name", "reason"), [
    ("too_few", "ValueError: it returned 1 values for 2 answers"),
    ("a_number", "TypeError: it returned float, but must return a list of numbers")])
def test_a_function_that_returns_the_wrong_type_gives_a_reason(rewards_of, name, reason):
    values, reasons = score(rewards_of(name), "a", "b")
    # When scored alone, each answer gets the single value.
    assert (values, reasons) == ([1, 1], [None, None]) if name == "too_few" else ([None, None], [reason, reason])


def test_output_printed_by_a_reward_is_not_its_result(rewards_of, capfd):
    assert score(rewards_of("prints"), "a", "b") == ([1, 1], [None, None])
    out, err = capfd.readouterr()
    assert out == "" and "written by a reward" in err


def test_each_call_starts_in_the_same_folder(rewards_of):
    rewards = rewards_of("moves")
    assert score(rewards, "a") == score(rewards, "a") == ([1], [None])


def test_a_forked_child_that_returns_is_ended(rewards_of, noted, capfd):
    rewards = rewards_of("returns_twice")
    assert score(rewards, "a", "two") == score(rewards, "a", "two") == ([1, 3], [None, None])
    assert len(noted()) == 2 and all_end(noted()) and not capfd.readouterr().err


def test_child_processes_of_a_reward_end_with_it(rewards_of, noted):
    rewards = rewards_of("starts_others")
    assert score(rewards, "a") == ([1], [None])
    assert len(noted()) == 2 and all(map(is_alive, noted()))
    rewards.close()
    assert all_end(noted())


def test_a_process_that_ends_between_calls_is_replaced(rewards_of):
    rewards = rewards_of("ends_later")
    for _ in range(2):
        [pid] = rewards.pids
        assert score(rewards, "a") == ([1], [None])
        assert all_end([pid])


def test_a_function_gets_all_answers_in_one_call(rewards_of):
    rewards = rewards_of("counts")
    assert score(rewards, "a", "b") == ([1, 1], [None, None])
    assert score(rewards, "a", "raises") == ([3, 4], [None, None])  # the second call failed


def test_a_function_gets_columns_and_conversations(rewards_of):
    rewards = rewards_of("arguments", "only_named", "later")
    values, reasons = rewards.score([
        RewardInput("p", "one", [1, 2], {"answer": "a", "prompt": "x", "completion": "y"}, None, True),
        RewardInput([{"role": "user", "content": "q"}], "two", [3], {"other": 2}, None, True)])
    assert values.tolist() == [[1, 0, 2], [2, 0, 2]] and reasons == [{}, {}]


def test_sets_have_the_same_order_in_each_process(rewards_of, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    text = subprocess.run([sys.executable, "-c", "print(''.join({'a', 'b', 'c', 'd', 'e'}), end='')"],
                          env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True).stdout
    assert score(rewards_of("order_in_sets"), text) == ([1], [None])


def test_reward_functions_need_trust(noted):
    with pytest.raises(ForeignCode, match=r"model.rewards\[0\].function: .*--trust_recipe_code true"):
        Rewards(read_rewards([{"function": f"{HOSTILE}.length"}]), 1, 1)


@pytest.mark.parametrize(("path", "message"), [
    (f"{HOSTILE}.lenght", r"rewards\[0\].function: .* cannot be loaded: ImportError: .*has no lenght"),
    ("tests.rollouts.no_such.length", "ModuleNotFoundError: No module named"),
    (f"{HOSTILE}.not_callable", "TypeError: .* is not a function, but int"),
])
def test_a_wrong_function_path_is_rejected_at_the_start(path, message):
    with trusting(True), pytest.raises(UserError, match=message):
        Rewards(read_rewards([{"function": path}]), 1, 1)


def test_a_regular_expression_that_hangs_affects_only_its_answer(capsys):
    """The answer gets the lowest score; with a missing one, hanging would be better than a wrong answer."""
    rewards = read_rewards([{"name": "regex", "pattern": "^(a+)+$"}, {"name": "exact_match", "column": "right"}])
    texts = ["aa", "b"] * 10  # more than one process scores at once
    texts[5] = "a" * 60 + "b"
    answers = [RewardInput("p", text, [], {"right": "b"}, None, True) for text in texts]
    with Rewards(rewards, 0.5, 2) as scorer:
        values, reasons = scorer.score(answers)
        pids = scorer.pids
    expected = np.array([[1, 0], [0, 1]] * 10, np.float32)
    expected[5] = 0, 0
    assert np.array_equal(values, expected)
    assert "1 of 20 answers made the reward regex hang or end its process. They get 0;" in capsys.readouterr().out
    assert reasons == [{}] * 5 + [{"regex": "took longer than 0.5 s"}] + [{}] * 14 and all_end(pids)


def test_an_interrupted_call_does_not_affect_the_next(rewards_of):
    rewards = rewards_of("length")

    def interrupt(*_):
        raise KeyboardInterrupt

    original_handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            rewards.score(make_inputs("sleeps", "a"))
    finally:
        signal.signal(signal.SIGALRM, original_handler)
    start = time.monotonic()
    assert score(rewards, "three", "a") == ([5, 1], [None, None])
    assert time.monotonic() - start < 15  # less than the timeout of the first call


PARENT = f"""
import threading, time
from lmmods.recipe.rewards import read_rewards
from lmmods.recipe.trust import trusting
from lmmods.rollouts.rewards import RewardInput, Rewards

rows = [RewardInput("p", text, [], {{"tests": ["assert True"]}}, None, True)
        for text in ("a" * 60 + "b", "import time; time.sleep(1000)")]
with trusting(True):
    rewards = Rewards(read_rewards([
        {{"name": "regex", "pattern": "^(a+)+$"}}, {{"name": "code", "timeout": 100}},
        {{"name": "f1", "column": "tests"}}, {{"function": "{HOSTILE}.starts_another"}}]), 1000, 3)
rewards.score([rows[0]._replace(row={{"tests": "assert True"}}, text="pass")])
threading.Timer(1.0, lambda: print(*rewards.pids, flush=True)).start()
rewards.score(rows)
"""


def test_reward_processes_end_with_a_killed_parent(noted):
    """Even while a regular expression holds the interpreter's lock, and with a program under test."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = list(map(int, parent.stdout.readline().split()))
    started = [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    assert len(pids) == 4 and len(noted()) == 2 and set(started) > set(noted())  # a program, too
    parent.kill()
    parent.wait()
    assert all_end([*pids, *started])
