"""The benchmark programs: two workers in turn, with the same weights and rows."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
WORKERS = ROOT / "benchmarks" / "workers"
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
         "vocab_size": 700}


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.syspath_prepend(str(WORKERS))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    # pytest may have imported other modules with these names
    for name in ("data", "work", "pair", "table", "plans", "startup", "roofline", "rounds", "profiled", "xla_trace",
                 "step_time", "predicting", "tricks"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_table_row_is_formatted_as_markdown():
    from table import Row, markdown

    last = markdown([Row("clm", "Trainer", 1.234, ">= 1.25", "why")]).splitlines()[-1]
    assert last == "| clm | Trainer | 1.23 | >= 1.25 | why |"


@pytest.mark.parametrize("task", ["sft", "clm", "mlm", "qa", "preference", "grpo", "sequence_classification",
                                  "token_classification"])
def test_peers_get_the_same_training_rows(tmp_path, monkeypatch, task):
    from work import ANSWER_LENGTH, CONFIGS, ENCODER_TASKS, LABELS, NO_DROPOUT, Work

    monkeypatch.setitem(CONFIGS, "small", {"model_type": "bert", **NO_DROPOUT, **SMALL} if task in ENCODER_TASKS else
                        {"model_type": "llama", **SMALL})
    folder = tmp_path / task
    length = 256 if task in ("qa", "grpo") else 64
    Work(task, "small", length, num_rows=40).write(folder)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").open()]
    if task == "preference":
        assert rows and all(len(row["prompt_ids"] + row[name]) <= length for row in rows
                            for name in ("chosen_ids", "rejected_ids"))
    elif task == "grpo":
        assert len(rows) == len({row["prompt"] for row in rows}) and all(row["prompt_ids"] for row in rows)
        assert all(len(row["prompt_ids"]) <= 256 - ANSWER_LENGTH for row in rows)
    else:
        assert rows and all(len(row["input_ids"]) <= length for row in rows)
    if task in ("clm", "mlm"):
        assert {len(row["input_ids"]) for row in rows} == {64}
    if task in LABELS:
        labels = [row["labels"] for row in rows]
        known = {label for value in labels for label in (value if task == "token_classification" else [value])} - {-100}
        assert len(rows) == 40 and known <= set(range(len(LABELS[task]))) and len(known) > 2
    if task == "mlm":  # peers mask themselves
        assert not any(3 in row["input_ids"] for row in rows)
    assert (folder / "check.json").exists() and (folder / "recipe.yaml").exists()


def test_weights_are_saved_in_the_requested_dtype(tmp_path, monkeypatch):
    import torch
    from safetensors.torch import load_file
    from work import CONFIGS, Work

    monkeypatch.setitem(CONFIGS, "small", {"model_type": "llama", **SMALL})
    Work("sft", "small", 64, num_rows=20, dtype="bfloat16").write(tmp_path / "work")
    weights = load_file(tmp_path / "work" / "model" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


def test_a_banned_end_token_is_never_sampled():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from work import ban_end_token

    model = LlamaForCausalLM(LlamaConfig(**SMALL, eos_token_id=2)).eval()
    ban_end_token(model)
    with torch.no_grad():
        probabilities = model(torch.arange(SMALL["vocab_size"])[None]).logits[0].softmax(-1)
    assert probabilities[:, 2].max() < 1e-9 and probabilities.max() < 0.05


def test_step_time_is_split_into_its_parts():
    from bench import _format_step
    from pair import Result

    result = Result()
    for seconds in (1.0, 2.0, 3.0):
        result.add({"tokens": 8, "cpu": 4.0, "wall": 8.0, "peak": 1.0, "loss": 2.0, "libraries": 0.5, "ready": 1.0,
                    "spent": {"drawing": seconds, "rewards": 0.4}}, steps=4)
    assert _format_step(result) == "2.00 (drawing 25%, rewards 5%, rest 70%)"


def test_every_peer_has_an_environment_and_a_program():
    from bench import COMPARISONS, HERE, PEERS

    for peer in PEERS.values():
        assert (HERE / "peers" / f"{peer.environment}.txt").exists() and (WORKERS / peer.program).exists()
    for comparison in COMPARISONS:
        assert {comparison.against, *comparison.tuned} <= {*PEERS, "our torch"}


def test_every_trick_has_valid_recipe_options(capsys):
    from tricks import TRICKS
    from work import TASKS

    from lmmods.cli import main

    for trick in TRICKS:
        module, data = TASKS[trick.work.task]
        fields = {"model": module, "model.pretrained": "x", "data": data, "data.source": "x", "trainer.max_steps": "1",
                  **({} if trick.work.method == "full" else {"model.lora.rank": "16"}), **trick.options}
        arguments = [part for key, value in fields.items() for part in (f"--{key}", value.format(folder="f"))]
        assert main(["fit", *arguments, "--print_config"]) == 0, trick.name
    assert capsys.readouterr().err == ""


def test_tuned_peers_do_the_same_work():
    from bench import COMPARISONS, PEERS

    tuned = [(comparison, peer) for comparison in COMPARISONS for peer in comparison.list_tuned()]
    assert tuned and all(PEERS[peer.against].tuned for _, peer in tuned)
    for comparison, peer in tuned:
        same = replace(comparison, against=peer.against, target=peer.target, memory=None, start=None)
        assert peer == same and peer.target == comparison.tuned[peer.against]


def test_grouped_batches_are_shuffled_whole_and_the_longest_stays_first():
    from torch_peers import shuffle_batches

    order = list(range(100, 143))
    shuffled = shuffle_batches(order, 4)
    batches, expected = ([of[start : start + 4] for start in range(0, 43, 4)] for of in (shuffled, order))
    assert batches[0] == expected[0] and batches[-1] == expected[-1] and batches != expected
    assert sorted(batches) == expected
    assert shuffle_batches([3, 1], 4) == [3, 1]


@pytest.mark.parametrize("stride", [1, 2])
def test_a_worker_reports_whole_rounds(stride):
    options = {"warm_up": 2, "steps": 4, "launched": time.monotonic()}
    program = """
import sys
from rounds import Rounds, read_settings
stride = int(sys.argv[2])
rounds = Rounds(read_settings(), stride)
rounds.record_ready()
rounds.record_loss(1.5)
print("output of a library")
while True:
    rounds.record_step(10 * stride)
"""
    result = subprocess.run([sys.executable, "-c", program, json.dumps(options), str(stride)], cwd=WORKERS,
                            input="\n\n", env={"PYTHONPATH": str(WORKERS)}, capture_output=True, text=True, timeout=60)
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert [report["tokens"] for report in reports] == [20, 40, 40], result.stderr
    assert all(report["loss"] == 1.5 and 0 < report["ready"] < 60 and 0 < report["libraries"] <= report["peak"]
               for report in reports)


def test_a_clock_measures_time_inside_the_model():
    import torch
    from predicting import Clock

    class Busy(torch.nn.Module):
        def forward(self):
            spend(0.1)

    def spend(seconds):
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass

    clock, network = Clock(), Busy()
    clock.begin(network)
    network()
    spend(0.1)
    network()
    clock.end()
    assert clock.calls == 2 and clock.inside == pytest.approx(0.2, abs=0.05)
    assert clock.total == pytest.approx(0.3, abs=0.05)


def test_steps_that_are_not_multiples_of_the_stride_are_rejected():
    from rounds import Rounds

    with pytest.raises(ValueError, match="not multiples of 4"):
        Rounds({"warm_up": 4, "steps": 6}, stride=4)


def test_an_evicted_file_keeps_its_content(tmp_path):
    from pair import evict

    (tmp_path / "weights").write_bytes(b"new" * 10_000)
    evict(tmp_path / "weights")
    assert (tmp_path / "weights").read_bytes() == b"new" * 10_000


def test_a_size_in_the_output_of_plan_is_parsed():
    from plans import parse_gibibytes

    assert parse_gibibytes("simulated  fits: about 1.25 GiB of 23.54 GiB for a step") == 1.25
    assert parse_gibibytes("512.00 MiB") == 0.5


def test_plans_are_written_to_the_pages(tmp_path, monkeypatch):
    import plans

    def plan(recipe, on):
        memory = "memory of each device"
        if recipe["engine"] == "torch":
            return plans.PlanOutput({memory: "simulated  fits: about 7.25 GiB of 72 GiB for a step",
                                     "a step takes at least": "assumed 344 ms (x)",
                                     "so at most": "assumed 23,830 tokens per second"}, None, {})
        return plans.PlanOutput({memory: "compiled  does not fit: 90.00 GiB of 72 GiB for a step"}, "fsdp", {
            memory: "compiled  fits: 9.00 GiB of 72 GiB", "a step takes at least": "assumed 1.2 s (x)"})

    monkeypatch.setattr(plans, "run_plan", plan)
    recipe = yaml.safe_load((plans.RECIPES / "sft_alpaca_7b.yaml").read_text())
    assert plans.can_plan(recipe)
    pages = {}
    for name in ("PAGE", "CATALOGUE"):
        pages[name] = tmp_path / getattr(plans, name).name
        pages[name].write_text(getattr(plans, name).read_text())
        monkeypatch.setattr(plans, name, pages[name])
    plans.write_pages({"sft_alpaca_7b": [plans.plan_recipe(recipe, *target) for target in plans.PLANS]})
    table = pages["PAGE"].read_text().partition(plans.MARK)[2]
    remedied = "does not fit: 90.00 GiB; `fsdp`: 9.00 GiB"
    assert table.count("\n") == 4 and "[`clm_gpt2_scratch`]" not in table
    assert f"| 7.25 GiB | {remedied} | {remedied} | 23,830 |" in table
    [row] = [line for line in pages["CATALOGUE"].read_text().split("\n") if "`sft_alpaca_7b`" in line]
    assert row.endswith("| 16 GB, a day | 7.25 GiB |")


@pytest.mark.slow
@pytest.mark.parametrize(("together", "rounds"), [(True, 2), (False, 1)])  # one by one, each round starts both
def test_two_workers_start_from_the_same_loss(tmp_path, together, rounds):
    from pair import Side, compare, ratio
    from work import Work

    work = replace(Work("clm", "tiny", 64), num_rows=200)
    work.write(tmp_path / "work")
    fields = {"folder": str(tmp_path / "work"), "warm_up": 2, "steps": 2, "options": ["--trainer.precision", "32-true"]}
    torch_side, jax_side = (Side(sys.executable, "ours.py", {**fields, "engine": name}) for name in ("torch", "jax"))
    torch_result, jax_result = compare(torch_side, jax_side, rounds=rounds, together=together)
    assert len(torch_result.speed) == len(jax_result.speed) == rounds and min(torch_result.speed + jax_result.speed) > 0
    assert torch_result.loss == pytest.approx(jax_result.loss, rel=1e-5) and 0.1 < torch_result.peak < 10
    assert ratio([1.0, 2.0, 9.0], [4.0, 4.0, 1.0]) == 0.5


@pytest.mark.parametrize("tied", [True, False])
def test_roofline_flops_equal_the_models_flops(tied):
    from profiled import count_sizes
    from roofline import flops
    from transformers import LlamaConfig, LlamaForCausalLM

    from lmmods.torch_engine.nn.summary import training_flops

    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50,
                                         intermediate_size=48, tie_word_embeddings=tied))
    model.model.layers[0].requires_grad_(False)
    sizes, report = count_sizes(model), {"tokens": 7, "scored": 7, "pairs": 0}
    assert flops(report, sizes, causal=True) == 7 * training_flops(model)
    # Queries and keys [10, 32] of each layer, multiplied once forward and twice backward, as are weights and values.
    assert flops(report | {"pairs": 100}, sizes, False) - flops(report, sizes, False) == 2 * 2 * 3 * 2 * 10 * 10 * 32
