"""GRPO runs with an environment: both engines, resumed with the same bits, on two processes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmmods.cli import main
from lmmods.core.labels import IGNORED
from lmmods.rollouts.rollout import read_rollout
from lmmods.runs.folder import RunFolder
from tests.engines.test_grpo_runs import SECONDS, load_adapter, read_files, read_tokens
from tests.finished_runs import rows
from tests.forks import together
from tests.rollouts.chats_with_tools import END, TEMPLATE, with_tools

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "add", "arguments": {"number": 1}}</tool_call>'
STEPS = 4
TIME_METRICS = SECONDS | {"train/seconds/tools"}
ENVIRONMENT = "tests.rollouts.hostile_environments.Adder"


@pytest.fixture(scope="module")
def model(shared, llama_of, tokenizer_folder):
    """Return a random Llama that often calls a tool, with a single token, or ends its turn."""

    def fill(folder):
        base_model = AutoModelForCausalLM.from_pretrained(llama_of(1))
        tokenizer = AutoTokenizer.from_pretrained(with_tools(tokenizer_folder, folder, TEMPLATE, CALL))
        base_model.resize_token_embeddings(len(tokenizer))
        with torch.no_grad():
            base_model.get_input_embeddings().weight[:, 0] = 100.0  # all tokens have it, and the head reads it
            base_model.get_output_embeddings().weight[tokenizer.convert_tokens_to_ids([CALL, END]), 0] += 0.7
        base_model.save_pretrained(folder)

    return shared("llama-calls", fill)


@pytest.fixture
def write_recipe(recipe, tmp_path, model):
    """Return a function that writes a recipe with an environment and returns its run folder and the arguments."""
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"instruction": f"Count to {word}.", "input": "", "output": word}) + "\n"
                              for word in "one two three four five six seven".split()))

    def write(folder: str | Path, **changes: Any) -> tuple[RunFolder, list[str]]:
        run = RunFolder(tmp_path / folder)
        return run, [*recipe("environment.yaml", **{
            "model": {"class_path": "GRPO", "init_args": {
                "pretrained": str(model), "lora": {"rank": 4}, "environment": ENVIRONMENT, "num_generations": 4,
                "max_new_tokens": 120, "max_turns": 4, "steps_per_rollout": 2,
                "rewards": [{"name": "length", "max_tokens": 110, "soft_tokens": 100, "weight": 0.3}],
                "optimizer": {"lr": 0.01}}},
            "data__class_path": "PromptData", "data__init_args__source": str(source), "data__init_args__val_size": 2,
            "data__init_args__template": None, "data__init_args__batch_size": 8,
            "data__init_args__eval_batch_size": 2, "data__init_args__max_length": 192, "trainer__max_steps": STEPS,
            "trainer__val_check_interval": STEPS, "trainer__default_root_dir": str(run.root),
            "checkpoint": {"every_n_steps": 1, "keep_last": 9}, **changes}), "--trust_recipe_code", "true"]

    return write


@pytest.fixture
def get_straight_run(write_recipe, shared):
    """Return a function that returns an engine's finished run, trained once for all tests."""
    def get_run(engine: str) -> RunFolder:
        def train(folder: Path) -> None:
            assert main(["fit", *write_recipe(folder / "run", engine=engine)[1]]) == 0

        return RunFolder(shared(f"environment-{engine}", train) / "run")

    return get_run


def read_answers(run: RunFolder) -> list[tuple[Any, Any, Any]]:
    """Return (group, answer, row) for each answer of all rollouts."""
    return [(group, answer, group.row(index)) for path in sorted(run.rollouts.glob("*.safetensors"))
            for group in read_rollout(run.rollouts, path.stem).groups for index, answer in enumerate(group.answers)]


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_environment_turns_are_not_targets_and_the_run_resumes(write_recipe, get_straight_run, model, engine):
    run = get_straight_run(engine)
    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = read_answers(run)
    answers_with_calls = [answer for _, answer, _ in answers if answer.tools["calls"]]
    assert len(answers) == 3 * 12 and len(answers_with_calls) > 4
    for group, answer, row in answers:
        assert "[add]" in tokenizer.decode(group.ids) and not answer.reasons
        replies = [turn.partition("</said>")[0] for turn in tokenizer.decode(answer.tokens).split("<said>")[1:]]
        environment_turns = tokenizer.decode(answer.tokens[~answer.is_sampled]).split("<said>")[1:]
        assert replies == [turn.partition("</said>")[0] for turn in environment_turns]
        # Each tool call returns the sum so far; the reward depends on the calls.
        numbers = [int(text) for text in replies if text.isdigit()]
        assert numbers == list(range(1, len(numbers) + 1)) or answer.tools["failures"]
        assert answer.rewards["environment"] in (0.0, 0.5, 1.0)
        assert ((row.labels[len(group.ids) :] != IGNORED) == answer.is_sampled).all() and len(answer.tokens) <= 120
        assert not answer.columns["old_logps"][~answer.is_sampled].any()
        np.testing.assert_allclose(answer.columns["old_logps"], answer.logps, atol=2e-4)
    steps = rows(run, TIME_METRICS)
    assert all(row["train/tool_calls"] > 0 for row in steps if "train/reward" in row)
    assert any({"val/reward", "val/tool_calls", "val/turns"} <= row.keys() for row in steps)
    other, arguments = write_recipe("stopped", engine=engine)
    assert main(["fit", *arguments, "--stop_at", "3"]) == 0  # inside the second rollout
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert read_files(other) == read_files(run)
    assert rows(other, TIME_METRICS) == rows(run, TIME_METRICS)
    assert all((values == load_adapter(run)[name]).all() for name, values in load_adapter(other).items())


def test_both_engines_generate_the_same_conversations(get_straight_run):
    assert read_tokens(get_straight_run("torch")) == read_tokens(get_straight_run("jax"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_generate_the_conversations_of_one(write_recipe, get_straight_run, strategy):
    one = get_straight_run("torch")
    two, arguments = write_recipe("two", trainer__devices=2, trainer__strategy=strategy, data__init_args__batch_size=4)
    together(["fit", *arguments])
    assert read_tokens(two) == read_tokens(one)


def test_an_environment_needs_trust_recipe_code(write_recipe, capsys):
    _, arguments = write_recipe("run")
    assert main(["fit", *arguments[:-2]]) == 2
    assert "model.environment" in capsys.readouterr().err
