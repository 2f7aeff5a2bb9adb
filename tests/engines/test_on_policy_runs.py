"""On-policy distillation as whole runs: TRL's loss on the very tokens, any cut, both engines, resumed."""

import numpy as np
import pytest
import torch

from lmmods.cli import main
from lmmods.core.generation_config import draws
from lmmods.data.sft import SFTData
from lmmods.runs.folder import RunFolder
from tests.finished_runs import TIMED, assert_same_run, rows

SHARE, MOST, WARM, BETA, RATIO, SEED, LENGTH = 0.5, 7, 1.3, 0.3, 0.25, 7, 64


@pytest.fixture
def student(recipe, llama_of, tmp_path):
    """A function that gives the arguments of a run of a student of one layer with a teacher of two, and its folder."""
    def write(name: str, **changes) -> tuple[list[str], RunFolder]:
        run = RunFolder(tmp_path / name)
        return recipe(f"{name}.yaml", **{
            "engine": "torch", "model__init_args__quantize": None, "model__init_args__lora": {"rank": 4},
            "model__init_args__config_overrides": {"attention_dropout": 0.0},
            "model__init_args__teacher": {"pretrained": str(llama_of(2)), "beta": BETA, "ratio": RATIO,
                                          "on_policy": SHARE, "max_new_tokens": MOST, "sampling_temperature": WARM},
            "data__init_args__max_length": LENGTH, "data__init_args__template": "plain",
            "trainer__val_check_interval": 6, "trainer__default_root_dir": str(run.root), **changes}), run

    return write


def drawn(model, prompt, numbers, end):
    """Tokens by inversion of the cumulative probabilities, one at a time and without a cache."""
    tokens = []
    for number in numbers:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        cumulated = (logits.double() / WARM).softmax(-1).cumsum(-1).numpy()
        tokens.append(int(np.argmax(cumulated > number)))
        if tokens[-1] == end:
            break
    return tokens


def first_step(source, student, teacher):
    """Metrics of the first step, from transformers' networks, these draws, and TRL's divergence."""
    pytest.importorskip("trl", reason="an extra of developers (dev)")
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDTrainer

    own, other = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
                  for folder in (student, teacher))
    data = SFTData(source=source, val_size=4, template="plain", max_length=LENGTH, batch_size=4)
    data.connect(pretrained=str(student), seed=SEED)
    data.prepare_data()
    data.setup("fit")
    order, items = data.train_batches(), data.items("train")
    divergence = cross_entropy = 0.0
    counts = {True: 0, False: 0}
    total = 0.0
    for number in order._order_of(0, order._rule)[0]:
        item = items[number]
        first, *numbers = draws(SEED, [number], 1 + MOST, step=0)[0]
        is_drawn, length = bool(first < SHARE), int(item["prompt_length"])
        ids, labels = item["input_ids"].tolist(), item["labels"].tolist()
        if is_drawn:
            answer = drawn(own, ids[:length], numbers, data.tokenizer.eos_token_id)
            ids, labels = [*ids[:length], *answer], [*[-100] * length, *answer]
        with torch.no_grad():
            ours, theirs = (model(torch.tensor([ids])).logits[:, :-1] for model in (own, other))
        targets = torch.tensor([labels[1:]])
        found = GKDTrainer.generalized_jsd_loss(ours, theirs, targets, BETA, reduction="sum").item()
        counts[is_drawn] += int((targets != -100).sum())
        divergence += found
        if is_drawn:
            total += found
        else:
            plain = torch.nn.functional.cross_entropy(ours[0], targets[0], reduction="sum").item()
            cross_entropy += plain
            total += RATIO * found + (1 - RATIO) * plain
    assert all(counts.values())
    count = sum(counts.values())
    return {"train/loss": total / count, "train/divergence": divergence / count,
            "train/cross_entropy": cross_entropy / counts[False], "train/drawn": counts[True] / count}


@pytest.mark.slow
def test_both_engines_draw_the_same_answers_under_any_cut_and_go_on(student, llama_of, instructions, stop_at):
    """A run that ends in the middle of a step draws its answers again, and ends with the same bits."""
    halves = {"data__init_args__batch_size": 2, "trainer__accumulate_grad_batches": 2,
              "trainer__val_check_interval": 12}
    arguments, whole = student("torch", **halves)
    assert main(["fit", *arguments]) == 0
    metrics = rows(whole)
    for name, value in first_step(str(instructions), llama_of(1), llama_of(2)).items():
        assert metrics[0][name] == pytest.approx(value, rel=1e-5), name
    arguments, broken = student("broken", **halves)
    stop_at(5)
    assert main(["fit", *arguments]) == 130
    stop_at(0)
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert_same_run(whole, broken)
    arguments, other = student("jax", engine="jax")
    assert main(["fit", *arguments]) == 0
    found, wanted = (rows(run, TIMED | {"train/epoch"}) for run in (other, whole))
    assert len(found) == len(wanted) == 6
    for row, expected in zip(found, wanted, strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
        assert 0 < row["train/drawn"] < 1
