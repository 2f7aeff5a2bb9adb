"""The benchmark's own machinery: two workers in turn, the same weights and rows on both sides."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("data", "work", "pair", "table"):  # pytest may know other modules by these names
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_row_of_the_table():
    from table import Row, markdown

    last = markdown([Row("clm", "Trainer", 1.234, ">= 1.25", "why")]).splitlines()[-1]
    assert last == "| clm | Trainer | 1.23 | >= 1.25 | why |"


@pytest.mark.parametrize("task", ["sft", "clm", "mlm", "qa", "preference"])
def test_peers_get_the_rows_that_we_train_on(tmp_path, monkeypatch, task):
    from work import CONFIGS, NO_DROPOUT, Work

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
             "vocab_size": 700}
    monkeypatch.setitem(CONFIGS, "small", {"model_type": "bert", **NO_DROPOUT, **small} if task in ("mlm", "qa") else
                        {"model_type": "llama", **small})
    folder = tmp_path / task
    length = 256 if task == "qa" else 64
    Work(task, "small", length, num_rows=40).write(folder)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").open()]
    if task == "preference":
        assert rows and all(len(row["prompt_ids"] + row[name]) <= length for row in rows
                            for name in ("chosen_ids", "rejected_ids"))
    else:
        assert rows and all(len(row["input_ids"]) <= length for row in rows)
    if task in ("clm", "mlm"):
        assert {len(row["input_ids"]) for row in rows} == {64}
    if task == "mlm":  # they mask by themselves
        assert not any(3 in row["input_ids"] for row in rows)
    assert (folder / "check.json").exists() and (folder / "recipe.yaml").exists()


@pytest.mark.slow
def test_two_workers_step_in_turn_from_the_same_loss(tmp_path):
    from pair import Side, compare, ratio
    from work import Work

    work = replace(Work("clm", "tiny", 64), num_rows=200)
    work.write(tmp_path / "work")
    asked = {"folder": str(tmp_path / "work"), "warm_up": 2, "steps": 2, "options": ["--trainer.precision", "32-true"]}
    torch_side, jax_side = (Side(sys.executable, "ours.py", {**asked, "engine": engine}) for engine in ("torch", "jax"))
    ours, theirs = compare(torch_side, jax_side, rounds=2)
    assert len(ours.speed) == len(theirs.speed) == 2 and min(ours.speed + theirs.speed) > 0
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5) and 0.1 < ours.peak < 10
    assert ratio([1.0, 2.0, 9.0], [4.0, 4.0, 1.0]) == 0.5
