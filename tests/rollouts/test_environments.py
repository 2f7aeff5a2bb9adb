"""Environments that hang, crash or lie: only their own answer ends, with a reason, and no process is left."""

import os
import time
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from lmmods.core.errors import UserError
from lmmods.recipe.trust import ForeignCode, trusting
from lmmods.rollouts.environments import MAX_CHARACTERS, Environments, Facts, Reply, Request
from tests.rollouts import hostile_environments as hostile
from tests.rollouts.test_reward_processes import all_end

PATH = "tests.rollouts.hostile_environments"


def start_environments(name: str = "Counter", timeout: float = 20.0, count: int = 2) -> Environments:
    with trusting(True):
        return Environments(f"{PATH}.{name}", timeout, count)


@pytest.fixture(scope="module")
def counters():
    with start_environments() as started:
        yield started


def send(counters: Environments, *requests: tuple[str, dict]) -> list[Reply]:
    [replies] = counters.ask({0: [Request(*request) for request in requests]}).values()
    counters.end(0)
    return replies


def misbehave(counters: Environments, how: str) -> tuple[Reply, Reply | None]:
    """Return the replies of an environment that misbehaves and then adds; another one at the same time only adds."""
    add = Request("add", {"number": 2})
    replies = counters.ask({0: [Request("misbehave", {"how": how}), add], 1: [add]})
    for index in (0, 1):
        counters.end(index)
    assert replies[1] == [Reply("2")]
    return replies[0][0], next(iter(replies[0][1:]), None)


@pytest.mark.slow  # transformers imports torch for the schemas
@pytest.mark.parametrize("name", ["Counter", "factory"])
def test_the_public_methods_of_an_environment_are_tools(name):
    with start_environments(name) as started:
        facts = started.read_facts()
    counter = hostile.Counter()
    assert facts == Facts([get_json_schema(tool) for tool in (counter.add, counter.later, counter.misbehave)], True)


@pytest.mark.slow
def test_the_documented_environment_runs(tmp_path, monkeypatch):
    code = (Path(__file__).parents[2] / "docs/environments.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "warehouse.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with trusting(True), Environments("warehouse.Warehouse", 20.0, 1) as started:
        facts = started.read_facts()
        replies = send(started, ("reset", {"stock": {"nails": 3}, "wanted": ["nails", 2], "prompt": "Sell."}),
                       ("count", {"item": "nails"}), ("sell", {"item": "nails", "number": 2}), ("get_reward", {}),
                       ("count", {"item": "screws"}))
    assert [tool["function"]["name"] for tool in facts.tools] == ["count", "sell"] and facts.gives_reward
    assert replies == [Reply(), Reply("3"), Reply("sold"), Reply(1.0), Reply(error="KeyError: 'screws'")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "message"), [
    ("NoReset", "TypeError: NoReset has no method reset"),
    ("Untyped", "TypeError: add cannot be a tool: Argument number is missing a type hint in function add"),
    ("broken_factory", "OSError: no display")])
def test_a_class_that_is_not_an_environment_is_rejected(name, message):
    with start_environments(name) as started, pytest.raises(UserError) as error:
        started.read_facts()
    assert str(error.value) == f"model.environment: {PATH}.{name}: {message}"


@pytest.mark.slow
def test_an_environment_may_have_neither_tools_nor_a_reward():
    with start_environments("Silent") as started:
        assert started.read_facts() == Facts([], False)


@pytest.mark.parametrize(("path", "message"), [
    ("tests.rollouts.nowhere.A", "cannot be imported: ModuleNotFoundError: No module named 'tests.rollouts.nowhere'"),
    (f"{PATH}.Missing", f"cannot be imported: ImportError: {PATH} has no Missing"),
    (f"{PATH}.NUMBER", "cannot be imported: TypeError: it is not a class or function, but int")])
def test_a_wrong_path_is_rejected(path, message):
    with trusting(True), pytest.raises(UserError) as error:
        Environments(path, 1.0, 1)
    assert str(error.value) == f"model.environment: {path} {message}"


def test_an_environment_must_be_trusted():
    with pytest.raises(ForeignCode, match=r"^model\.environment: .*It has not run.*--trust_recipe_code true"):
        Environments(f"{PATH}.Counter", 1.0, 1)


def test_calls_of_an_environment_share_its_state(counters):
    assert send(counters, ("reset", {"target": 7, "other": 1}), ("add", {"number": 3}),
                ("later", {"number": 2, "times": [1, 1]}), ("get_reward", {})) == [
        Reply(), Reply("3"), Reply('{"total": 7, "ä": null}'), Reply(1.0)]
    # and not with another one
    assert send(counters, ("add", {"number": 1}), ("get_reward", {})) == [Reply("1"), Reply(0.0)]


def test_all_environments_start_in_the_same_state(counters):
    replies = counters.ask({index: [Request("reset", {"hint": "random"})] for index in range(3)})
    pids = counters.pids
    for index in range(3):
        counters.end(index)
    assert replies[0] == replies[1] == replies[2] and replies[0][0].value.startswith(" Random: 0.")
    assert len(pids) == 4 and all_end(pids[1:]) and counters.pids == pids[:1]


@pytest.mark.parametrize(("how", "error"), [
    ("leaves", "SystemExit: gone"), ("raises", "ValueError: no"), ("eats", "took more than 4 GiB of memory")])
def test_an_exception_in_a_tool_is_reported(counters, how, error):
    assert misbehave(counters, how) == (Reply(error=error), Reply("2"))


@pytest.mark.parametrize(("how", "error"), [
    ("exits", "ended its process with status 3"), ("kills", "ended its process by signal 9 (Killed)")])
def test_a_crash_ends_only_its_environment(counters, how, error):
    assert misbehave(counters, how) == (Reply(error=error, has_ended=True), None)


def test_a_call_that_hangs_ends_only_its_environment():
    with start_environments(timeout=0.5) as counters:
        counters.ask({index: [Request("add", {"number": 0})] for index in (0, 1)})
        start = time.monotonic()
        assert misbehave(counters, "sleeps") == (Reply(error="took longer than 0.5 s", has_ended=True), None)
        assert time.monotonic() - start < 5
        assert send(counters, ("reset", {"hint": "sleeps"}))[0].has_ended
        pids = counters.pids
    assert all_end(pids)


@pytest.mark.parametrize(("how", "value"), [("half", "a?b"), ("object", "{1, 2}"), ("forks", "two"), ("x", "x")])
def test_tool_results_become_text(counters, how, value):
    assert misbehave(counters, how) == (Reply(value), Reply("2"))


def test_a_very_long_result_is_truncated(counters):
    flood = "flood " * 100_000
    assert misbehave(counters, "floods")[0] == Reply(flood[:MAX_CHARACTERS], num_left_out=len(flood) - MAX_CHARACTERS)


def test_processes_of_a_tool_end_with_its_environment(counters):
    pid = int(misbehave(counters, "starts")[0].value)
    assert all_end([pid])


@pytest.mark.parametrize(("total", "reply"), [
    (666, Reply(error="returned nan")), (667, Reply(error="RuntimeError: no reward")), (668, Reply())])
def test_an_environment_without_a_valid_reward_gives_a_reason(counters, total, reply):
    assert send(counters, ("add", {"number": total}), ("get_reward", {}))[1] == reply


def test_wrong_arguments_are_reported(counters):
    assert send(counters, ("add", {"numbers": 1}))[0].error == (
        "TypeError: Counter.add() got an unexpected keyword argument 'numbers'")
    assert send(counters, ("reset", {"hint": "raises"}))[0].error == "LookupError: no such hint"
    assert send(counters, ("reset", {"hint": 3}))[0].error == "reset returned int, but must return a string or None"


def test_many_environments_share_a_few_processes():
    with start_environments(count=3) as counters:
        replies = counters.ask({index: [Request("add", {"number": index})] * 2 for index in range(40)})
        assert replies == {index: [Reply(f"{index}"), Reply(f"{2 * index}")] for index in range(40)}
        pids = counters.pids
    assert len(pids) == 41 and all_end(pids)


def test_no_environment_survives_an_interrupted_trainer(monkeypatch):
    with start_environments(count=1) as counters:
        monkeypatch.setattr("lmmods.rollouts.environments.wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            counters.ask({0: [Request("misbehave", {"how": "sleeps"})], 1: []})
        monkeypatch.undo()
        assert send(counters, ("add", {"number": 1})) == [Reply("1")]  # from a new process


def test_the_end_of_the_template_process_is_reported():
    with start_environments() as counters:
        os.kill(counters.pids[0], 9)
        with pytest.raises(UserError, match=r"ended its process by signal 9 \(Killed\), so no environment can start"):
            counters.ask({0: [Request("add", {"number": 1})]})
