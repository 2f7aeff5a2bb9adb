"""Compare named rewards with values by hand, TRL, SQuAD and math-verify; test sums, and programs in answers."""

import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from lmmods.core.errors import UserError
from lmmods.data.grpo import Prompt
from lmmods.recipe.rewards import read_rewards
from lmmods.rollouts import code_tests
from lmmods.rollouts.named_rewards import NamedScorer, Text, Unscorable, read_expected
from lmmods.rollouts.rewards import MAX_CHECKED_ROWS, RewardInput, Rewards, check_prompts, sum_rewards

NAN = np.nan


def reward(text: str, expected=None, num_tokens: int = 0, **settings) -> float:
    """Return the reward of one answer, scored in this process."""
    [reward_settings] = read_rewards([settings])
    [value] = NamedScorer(reward_settings).load()([Text(text, num_tokens, expected)])
    return value


# One answer -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "expected", "options", "value"), [
    ("Paris", ["Paris"], {}, 1), (" Paris\n", ["Paris "], {}, 1), ("paris", ["Paris"], {}, 0),
    ("Paris", ["London", "Paris"], {}, 1), ("Paris.", ["Paris"], {}, 0), ("", [""], {}, 1),
    (" Paris", ["Paris"], {"strip": False}, 0), ("PARIS", ["Paris"], {"ignore_case": True}, 1),
    ("STRASSE", ["straße"], {"ignore_case": True}, 1),
    ("so #### 12, no: #### 7", ["7"], {"extract": r"#### (\d+)"}, 1),
    ("so #### 7, no: #### 12", ["7"], {"extract": r"#### (\d+)"}, 0),
    ("#### 7", ["3 + 4 is 7\n#### 7"], {"extract": r"#### (\d+)"}, 1),
    ("7", ["7"], {"extract": r"#### (\d+)"}, 0), ("b", [""], {"extract": r"(a)?b"}, 1)])
def test_exact_match_compares_the_extracted_answer(text, expected, options, value):
    assert reward(text, expected, name="exact_match", **options) == value


@pytest.mark.parametrize(("name", "right"), [("contains", " "), ("contains", ""), ("f1", "A"), ("f1", "the!")])
def test_right_answers_that_match_everything_are_rejected(name, right):
    with pytest.raises(Unscorable, match="the right answer .*(empty|only articles)"):
        reward("", ["cat", right] if name == "contains" else [right], name=name)
    assert reward("", [""], name="f1") == 1 and reward("", ["The", "cat"], name="f1") == 0


@pytest.mark.parametrize(("text", "expected", "options", "value"), [
    ("It is Paris.", ["Paris"], {}, 1), ("It is paris.", ["Paris"], {}, 0),
    ("It is paris.", ["Paris"], {"ignore_case": True}, 1), ("Rome", ["Paris", "Rome"], {}, 1)])
def test_contains_finds_any_right_answer(text, expected, options, value):
    assert reward(text, expected, name="contains", **options) == value


@pytest.mark.parametrize(("text", "options", "value"), [
    ("a 12 b", {"pattern": r"\d+"}, 1), ("a b", {"pattern": r"\d+"}, 0),
    ("a 12 b", {"pattern": r"\d+", "full": True}, 0),
    (" 12\n", {"pattern": r"\d+", "full": True}, 1), ("A", {"pattern": "(?i)a"}, 1),
    ("12\n13", {"pattern": r"\d+", "full": True}, 0)])
def test_regex_searches_the_answer_or_matches_all_of_it(text, options, value):
    assert reward(text, name="regex", **options) == value


@pytest.mark.parametrize(("text", "options", "value"), [
    ("<think>a</think><answer>b</answer>", {}, 1), ("\n<think>a\n\nb</think>\n\n<answer>c</answer>\n", {}, 1),
    ("<think>a</think><answer></answer>", {}, 0), ("<think>\n</think><answer>b</answer>", {}, 0),
    ("x<think>a</think><answer>b</answer>", {}, 0), ("<think>a</think>x<answer>b</answer>", {}, 0),
    ("<think>a</think><answer>b</answer>x", {}, 0), ("<answer>b</answer><think>a</think>", {}, 0),
    ("<think>a</think>", {}, 0), ("<think>a<answer>b</answer></think>", {}, 0),
    ("<think>a</think><think>a</think><answer>b</answer>", {}, 0),
    ("<think><think>a</think><answer>b</answer>", {}, 0),
    ("a</think><answer>b</answer>", {}, 0), ("a</think><answer>b</answer>", {"opened": True}, 1),
    ("<a.c>1</a.c>", {"tags": ["a.c"]}, 1), ("<abc>1</abc>", {"tags": ["a.c"]}, 0)])
def test_format_requires_the_tags_in_order(text, options, value):
    assert reward(text, name="format", **options) == value


@pytest.mark.parametrize(("max_tokens", "soft_tokens"), [(100, 20), (20, 20), (7, 3)])
def test_length_equals_the_soft_overlong_punishment_of_trl(max_tokens, soft_tokens):
    trl = pytest.importorskip("trl.rewards")
    trl_reward = trl.get_soft_overlong_punishment(max_tokens, soft_tokens)
    lengths = range(max_tokens + 5)
    expected = trl_reward(completion_ids=[[1] * length for length in lengths])
    assert [reward("", num_tokens=length, name="length", max_tokens=max_tokens, soft_tokens=soft_tokens)
            for length in lengths] == pytest.approx(expected, rel=1e-15)


def test_length_equals_values_computed_by_hand():
    assert [reward("", num_tokens=length, name="length", max_tokens=10, soft_tokens=4) for length in
            (0, 6, 7, 8, 9, 10, 11, 99)] == [0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
    assert [reward("", num_tokens=length, name="length", max_tokens=10) for length in (9, 10, 11)] == [0, 0, -1]


@pytest.mark.parametrize(("text", "expected"), [
    ("the cat sat", ["a cat sat down"]), ("Cat, sat!", ["cat sat"]), ("dog", ["cat"]), ("cat cat dog", ["cat dog dog"]),
    ("cat", ["dog", "a small cat"]), ("", ["cat"])])
def test_f1_equals_the_squad_metric(text, expected):
    from torchmetrics.functional.text import squad

    squad_scores = squad([{"prediction_text": text, "id": "1"}],
                         [{"answers": {"answer_start": [0] * len(expected), "text": expected}, "id": "1"}])
    assert reward(text, expected, name="f1") == pytest.approx(float(squad_scores["f1"]) / 100, rel=1e-6)


MATHS = [  # answer, right answer, equal
    (r"So it is $\boxed{\frac{1}{2}}$.", "1/2", 1), (r"\boxed{0.5}", r"\frac12", 1), ("The answer is 0.5", "1/2", 1),
    ("The answer is 1,000.", "1000", 1), (r"\boxed{\frac{2}{4}}", r"$\frac{1}{2}$", 1), (r"\boxed{3}", "2", 0),
    (r"$2 + 2 = 4$", "4", 1), (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1), (r"\boxed{x^2 + 1}", "(x+1)^2", 0),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1), (r"\boxed{(1, 2)}", "(1,2)", 1), (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1),
    ("First $\\boxed{1}$.\nNo: $\\boxed{2}$", "2", 1), (r"\boxed{1} and \boxed{2}", r"\{1,2\}", 1),
    ("no number at all", "2", 0), ("", "2", 0),
    (r"\boxed{50\%}", "0.5", 1), (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1)]


@pytest.mark.parametrize(("text", "right", "value"), MATHS)
def test_math_compares_expressions_by_value(text, right, value):
    pytest.importorskip("math_verify")
    assert reward(text, [right], name="math") == value


def test_math_equals_the_accuracy_of_trl_for_boxed_answers():
    trl = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    boxed = [(text, right) for text, right, _ in MATHS if "boxed" in text]
    trl_rewards = trl.accuracy_reward([[{"content": text}] for text, _ in boxed], [f"${right.strip('$')}$"
                                                                                   for _, right in boxed])
    assert [reward(text, [right], name="math") for text, right in boxed] == trl_rewards


def test_math_needs_an_expression_as_right_answer():
    pytest.importorskip("math_verify")
    with pytest.raises(Unscorable, match=r"the right answer '\$\$' is not a mathematical expression"):
        reward("1", ["$$"], name="math")


# What a row provides --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "row", "reference", "expected"), [
    ({"name": "f1"}, {}, "yes", ["yes"]), ({"name": "f1", "column": "a"}, {"a": "x"}, "yes", ["x"]),
    ({"name": "f1", "column": "a"}, {"a": 12}, None, ["12"]),
    ({"name": "f1", "column": "a"}, {"a": 0.5}, None, ["0.5"]),
    ({"name": "exact_match", "column": "a"}, {"a": ["x", 2]}, None, ["x", "2"]),
    ({"name": "contains", "text": "t"}, {}, None, ["t"]), ({"name": "regex", "pattern": "a"}, {}, None, None),
    ({"name": "code"}, {"tests": ["assert 1"]}, None, ["assert 1"])])
def test_a_reward_reads_the_right_answer_from_its_row(options, row, reference, expected):
    assert read_expected(read_rewards([options])[0], row, reference) == expected


@pytest.mark.parametrize(("options", "row", "reason"), [
    ({"name": "f1"}, {"a": "x"}, "the row has no reference answer"),
    ({"name": "math", "column": "b"}, {"a": "x"}, "the row has no column b"),
    ({"name": "exact_match", "column": "a"}, {"a": None}, "column a is empty"),
    ({"name": "exact_match", "column": "a"}, {"a": []},
     "column a is an empty list, but must be a string, a number or a list of these"),
    ({"name": "contains", "column": "a"}, {"a": {"x": 1}}, "column a is dict, but must be"),
    ({"name": "f1", "column": "a"}, {"a": True}, "column a is bool, but must be"),
    ({"name": "code"}, {}, "the row has no column tests")])
def test_a_row_without_a_right_answer_gives_a_reason(options, row, reason):
    with pytest.raises(Unscorable, match=reason):
        read_expected(read_rewards([options])[0], row, None)


# Programs -------------------------------------------------------------------------------------------------------------

ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(("text", "program"), [
    (ADD, ADD), ("```python\nx = 1\n```\nor\n```\nx = 2\n```\nDone.", "x = 2\n"), ("```py\nx = 1", "```py\nx = 1"),
    ("So:\n  ```python\n  x = 1\n  ```", "  x = 1\n")])
def test_the_program_is_extracted_from_the_answer(text, program):
    assert code_tests.extract_program(text) == program


@pytest.mark.parametrize(("text", "tests", "fraction"), [
    (ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3", "assert add('a', 'b') == 'ab'"], 2 / 3),
    (ADD, "assert add(1, 2) == 3\nassert add(2, 2) == 4", 1),
    (ADD, '["assert add(1, 2) == 3"]', 1), (f"```python\n{ADD}\n```", ["assert add(0, 0) == 0"], 1),
    ("print(sum(map(int, input().split())))", {"inputs": ["1 2\n", "3 4"], "outputs": ["3", "8\n"]}, 1 / 2),
    ("print(input())\nprint(input())", [{"input": ["a", "b"], "output": "a  \nb\n\n"}], 1),
    ("print(input())", '{"inputs": ["é"], "outputs": ["é"]}', 1),
    ("print(1); raise SystemExit(1)", {"inputs": [""], "outputs": ["1"]}, 0),
    ("if __name__ == '__main__':\n    print(1)", {"inputs": [""], "outputs": ["1"]}, 1),
    ("if __name__ == '__main__':\n    fail()\nx = 1", ["assert x == 1"], 1),
    ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1", ["assert A().x == 1"], 1),
    ("def add(", ["assert True"], 0), ("import os; os._exit(0)", ["assert False"], 0),
    ("raise SystemExit", ["assert False"], 0), ("print('passed')", ["assert False"], 0),
    ("x = bytearray(2 ** 31)", ["assert True"], 0), ("open('f', 'w').write('a' * 2 ** 25)", ["assert True"], 0),
    ("import os, signal; os.kill(os.getppid(), signal.SIGTERM)", ["assert False"], 0),
    ("import lmmods_tests_of_nothing", ["assert True"], 0)])
def test_programs_are_scored_by_their_tests(text, tests, fraction):
    assert code_tests.run_tests(text, tests, 20, count_all=True) == pytest.approx(fraction)
    assert reward(text, tests, name="code", timeout=20) == float(fraction == 1)


def test_partial_rewards_the_fraction_of_passed_tests():
    tests = ["assert add(1, 2) == 3", "assert False"]
    assert reward(ADD, tests, name="code", partial=True) == 0.5 and reward(ADD, tests, name="code") == 0


@pytest.mark.parametrize("program", [
    "while True: pass", "import time; time.sleep(1000)", "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "while True: print('a' * 10 ** 6)", "input()"])
def test_programs_that_do_not_end_are_stopped(program):
    start = time.monotonic()
    assert code_tests.run_tests(program, ["assert True"] * 3, 0.3, count_all=True) == 0
    assert time.monotonic() - start < 3


MARKED = "lmmods-test-of-forks"
needs_isolation = pytest.mark.skipif(not code_tests.can_isolate(), reason="needs namespaces of Linux")


@needs_isolation
def test_child_processes_of_a_program_end_with_it():
    def list_marked() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["cmdline"]) if MARKED in (process.info["cmdline"] or [])]

    program = f"""
import subprocess, sys
def start():
    code = "import time; print('up', flush=True); time.sleep(1000)"
    return subprocess.Popen([sys.executable, "-c", code, {MARKED!r}], start_new_session=True, stdout=subprocess.PIPE,
                            text=True)
"""
    assert code_tests.run_tests(program, ["assert start().stdout.readline() == 'up\\n'"], 20, count_all=True) == 1
    deadline = time.monotonic() + 5
    while list_marked() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not list_marked()


@needs_isolation
def test_a_program_has_no_network():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)"
        assert subprocess.run([sys.executable, "-c", program]).returncode == 0
        assert code_tests.run_tests(program, ["assert True"], 20, count_all=True) == 0


def test_a_program_sees_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    tests = ["import os\nassert 'HF_TOKEN' not in os.environ", "import os\nassert os.environ['HOME'] == os.getcwd()"]
    assert code_tests.run_tests("pass", tests, 20, count_all=True) == 1


def test_sets_have_the_same_order_in_each_program():
    program = "print(''.join({'a', 'b', 'c', 'd', 'e'}))"
    expected = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": "0"},
                              capture_output=True, text=True, check=True).stdout
    assert code_tests.run_tests(program, {"inputs": [""], "outputs": [expected]}, 20, count_all=True) == 1


@pytest.mark.parametrize(("tests", "message"), [
    ([], "the list of tests is empty"), ("", "a test is ''"), ([1], "a test is 1, but must be Python code"),
    (3, "a test is 3"),
    ({"inputs": ["a"]}, "must have inputs and outputs"), ({"inputs": ["a"], "outputs": []}, "of the same length"),
    ({"fn_name": "f", "inputs": [[1]], "outputs": [2]}, "fn_name are not supported")])
def test_a_wrong_tests_column_gives_a_reason(tests, message):
    with pytest.raises(Unscorable, match=f"column tests: .*{message}"):
        reward(ADD, tests, name="code")


# Many answers ---------------------------------------------------------------------------------------------------------


def make_input(text: str, num_tokens: int = 0, reference: str | None = None, **row) -> RewardInput:
    return RewardInput("p", text, [0] * num_tokens, row, reference, True)


ANSWERS = [make_input("a", 3, "a", tests="assert True"), make_input("pass", 9, "pass", tests="assert True"),
           make_input("b b", 1, "b c"), make_input("x", 2), make_input("pass", 1, "", tests=["assert 0"])]
REWARDS = [{"name": "exact_match"}, {"name": "f1", "weight": 0.5}, {"name": "length", "max_tokens": 4},
           {"name": "code", "label": "tests"}, {"name": "regex", "pattern": "^[ab]", "weight": 2}]


@pytest.mark.parametrize("processes", [1, 3])
def test_scores_and_reasons_are_in_the_order_of_the_answers(processes):
    answers = ANSWERS * 5  # more than one process scores at once
    with Rewards(read_rewards(REWARDS), 30, processes) as rewards:
        assert rewards.names == ("exact_match", "f1", "length", "tests", "regex")
        assert rewards.weights.tolist() == [1, 0.5, 1, 1, 2]
        values, reasons = rewards.score(answers)
        assert values.dtype == np.float32
        no_tests = "the row has no column tests"
        expected = [[1, NAN, 0, 0, 1], [1, 1, -1, 1, 0], [0, 0.5, 0, NAN, 1], [NAN, NAN, 0, NAN, 0], [0, 0, 0, 0, 0]]
        assert np.array_equal(values, np.array(expected * 5, np.float32), equal_nan=True)
        no_reference = "the row has no reference answer"
        no_words = "the right answer 'a' has only articles and punctuation, which do not count"
        assert reasons == [{"f1": no_words}, {}, {"tests": no_tests},
                           {"exact_match": no_reference, "f1": no_reference, "tests": no_tests}, {}] * 5
        assert len(rewards.pids) == processes
        values, reasons = rewards.score([])
        assert values.shape == (0, 5) and reasons == []
        assert sum_rewards(values, rewards.weights, reasons, rewards.names).shape == (0,)


def test_rewards_are_summed_by_weight_without_missing_ones():
    values = np.array([[1, 2], [NAN, 2], [NAN, NAN], [1, NAN], [0.25, -1]], np.float32)
    late = "took longer than 1 s"
    reasons = [{}, {}, {}, {"b": late}, {"a": late}]  # the last one has a value anyway
    sums = sum_rewards(values, np.array([1, 0.5]), reasons, ["a", "b"])
    assert np.array_equal(sums, [2, 1, NAN, NAN, -0.25], equal_nan=True)
    assert np.isnan(sum_rewards(values, np.array([1, 0.5]), [{"environment": late}] * 5, ["a", "b"])).all()


def test_a_reward_model_scores_with_its_scorer():
    scored_answers = []

    def scorer(answers):
        scored_answers.extend(answers)
        return [0.5, None, NAN, float("inf"), -3.0]

    settings = read_rewards([{"name": "length", "max_tokens": 5}, {"model": "runs/reward"}])
    with Rewards(settings, 30, 1, {"reward": scorer}) as rewards:
        values, reasons = rewards.score(ANSWERS)
    assert scored_answers == ANSWERS
    assert np.array_equal(values, [[0, 0.5], [-1, NAN], [0, NAN], [0, NAN], [0, -3]], equal_nan=True)
    assert reasons == [{}, *[{"reward": "the model gives no score"}] * 3, {}]
    with pytest.raises(ValueError, match="scorers are for"):
        Rewards(settings, 30, 1)


def test_math_without_its_package_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"rewards\[0\]: math needs math-verify. Install it: pip install -e '.\[math"):
        Rewards(read_rewards([{"name": "math"}]), 30, 1)


def make_prompts(*rows: dict, reference: str | None = None) -> list[Prompt]:
    return [Prompt(index, [1], None, row, reference) for index, row in enumerate(rows)]


@pytest.mark.parametrize(("options", "prompts", "message"), [
    ({"name": "exact_match", "column": "anwser"}, make_prompts({"answer": "1", "text": "a"}),
     "model.rewards[0]: exact_match cannot score answers to any of the 1 rows of data.source: the row has no column "
     "anwser. Set another column. The columns are answer, text. Did you mean answer?"),
    ({"name": "f1"}, make_prompts({"answer": "1"}, {"answer": "2"}),
     "model.rewards[0]: f1 cannot score answers to any of the 2 rows of data.source: the row has no reference "
     "answer. Set column to the name of the column with the right answer. The columns are answer."),
    ({"name": "code"}, make_prompts({"tests": None}),
     "model.rewards[0]: code cannot score answers to any of the 1 rows of data.source: column tests is empty. Set "
     "another column. The columns are tests.")])
def test_a_reward_that_no_row_can_use_is_rejected(options, prompts, message):
    with pytest.raises(UserError) as error:
        check_prompts(read_rewards([options]), "data.source", prompts, True)
    assert str(error.value) == message


def test_rows_that_a_reward_cannot_score_are_counted(capsys):
    prompts = make_prompts({"a": "1"}, {"a": None}, {"a": []}, {}, {}, reference="x")
    rewards = read_rewards([{"name": "exact_match", "column": "a"}, {"name": "f1"}, {"name": "format"},
                            {"name": "contains", "text": "y"}])
    check_prompts(rewards, "data.source", prompts, True)
    assert capsys.readouterr().out == (
        "warning: model.rewards[0]: answers to 4 of 5 rows of data.source have no reward and are not trained on, as "
        "exact_match cannot score them: the row has no column a (2 rows).\n")
    check_prompts(rewards, "data.source", prompts, False)
    check_prompts(rewards[1:], "data.source", prompts, True)
    check_prompts(rewards, "data.source", [], True)
    assert not capsys.readouterr().out


def test_only_the_first_rows_are_checked():
    rewards = read_rewards([{"name": "exact_match", "column": "a"}])
    read = []
    check_prompts(rewards, "data.source",
                  (read.append(index) or prompt for index in range(3 * MAX_CHECKED_ROWS)
                   for prompt in make_prompts({"a": "1" if index == MAX_CHECKED_ROWS + 1 else None})), True)
    assert len(read) == MAX_CHECKED_ROWS + 3  # one more is read to see that it is enough


@pytest.mark.slow
def test_math_in_a_process_gives_the_same_rewards():
    """math-verify's time limits use signals, which need the main thread; reward processes do not use them."""
    pytest.importorskip("math_verify")
    with Rewards(read_rewards([{"name": "math", "column": "right"}]), 60, 2) as rewards:
        values, reasons = rewards.score([make_input(text, right=right) for text, right, _ in MATHS])
    assert values[:, 0].tolist() == [value for *_, value in MATHS] and not any(reasons)
