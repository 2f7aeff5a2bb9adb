"""Reinforcement learning with an environment as whole runs: both engines, resumed to the bit, on two processes."""

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
from tests.engines.test_grpo_runs import SECONDS, adapter, files, tokens
from tests.finished_runs import rows
from tests.forks import together
from tests.rollouts.chats_with_tools import END, TEMPLATE, with_tools

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "add", "arguments": {"number": 1}}</tool_call>'
STEPS = 4
TIMES = SECONDS | {"train/seconds/tools"}
ENVIRONMENT = "tests.rollouts.hostile_environments.Adder"


@pytest.fixture(scope="module")
def model(shared, llama_of, tokenizer_folder):
    """A random Llama that often calls a tool, in a token of its own, or ends its turn."""

    def fill(folder):
        network = AutoModelForCausalLM.from_pretrained(llama_of(1))
        tokenizer = AutoTokenizer.from_pretrained(with_tools(tokenizer_folder, folder, TEMPLATE, CALL))
        network.resize_token_embeddings(len(tokenizer))
        with torch.no_grad():
            network.get_input_embeddings().weight[:, 0] = 100.0  # what every token has, the output head finds again
            network.get_output_embeddings().weight[tokenizer.convert_tokens_to_ids([CALL, END]), 0] += 0.7
        network.save_pretrained(folder)

    return shared("llama-calls", fill)


@pytest.fixture
def written(recipe, tmp_path, model):
    """A function that writes the recipe of a run with an environment into a folder; returns both."""
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
def straight(written, shared):
    """A function that gives the finished run of an engine, trained once for all tests."""
    def run(engine: str) -> RunFolder:
        def train(folder: Path) -> None:
            assert main(["fit", *written(folder / "run", engine=engine)[1]]) == 0

        return RunFolder(shared(f"environment-{engine}", train) / "run")

    return run


def answers(run: RunFolder) -> list[tuple[Any, Any, Any]]:
    """Groups, their answers and rows, of all rollouts."""
    return [(group, answer, group.row(number)) for path in sorted(run.rollouts.glob("*.safetensors"))
            for group in read_rollout(run.rollouts, path.stem).groups for number, answer in enumerate(group.answers)]


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_run_with_an_environment(written, straight, model, engine):
    run = straight(engine)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = answers(run)
    called = [answer for _, answer, _ in found if answer.tools["calls"]]
    assert len(found) == 3 * 12 and len(called) > 4
    for group, answer, row in found:
        assert "[add]" in tokenizer.decode(group.ids) and not answer.reasons
        said = [turn.partition("</said>")[0] for turn in tokenizer.decode(answer.tokens).split("<said>")[1:]]
        told = tokenizer.decode(answer.tokens[~answer.is_sampled]).split("<said>")[1:]
        assert said == [turn.partition("</said>")[0] for turn in told]
        # Each call is answered by the sum so far, and the reward is of what was called.
        numbers = [int(text) for text in said if text.isdigit()]
        assert numbers == list(range(1, len(numbers) + 1)) or answer.tools["failures"]
        assert answer.rewards["environment"] in (0.0, 0.5, 1.0)
        assert ((row.labels[len(group.ids) :] != IGNORED) == answer.is_sampled).all() and len(answer.tokens) <= 120
        assert not answer.columns["old_logps"][~answer.is_sampled].any()
        np.testing.assert_allclose(answer.columns["old_logps"], answer.logps, atol=2e-4)
    steps = rows(run, TIMES)
    assert all(row["train/tool_calls"] > 0 for row in steps if "train/reward" in row)
    assert any({"val/reward", "val/tool_calls", "val/turns"} <= row.keys() for row in steps)
    other, arguments = written("stopped", engine=engine)
    assert main(["fit", *arguments, "--stop_at", "3"]) == 0  # inside the second rollout
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert files(other) == files(run)
    assert rows(other, TIMES) == rows(run, TIMES)
    assert all((values == adapter(run)[name]).all() for name, values in adapter(other).items())


def test_both_engines_have_the_same_conversations(straight):
    assert tokens(straight("torch")) == tokens(straight("jax"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_have_the_conversations_of_one(written, straight, strategy):
    one = straight("torch")
    two, arguments = written("two", trainer__devices=2, trainer__strategy=strategy, data__init_args__batch_size=4)
    together(["fit", *arguments])
    assert tokens(two) == tokens(one)


def test_an_environment_must_be_trusted(written, capsys):
    _, arguments = written("run")
    assert main(["fit", *arguments[:-2]]) == 2
    assert "model.environment" in capsys.readouterr().err
