"""On-policy distillation runs: the tokens and the loss of TRL, any batch split, both engines, resume."""

import numpy as np
import pytest
import torch

from lmmods.cli import main
from lmmods.core.generation_config import sampling_uniforms
from lmmods.data.sft import SFTData
from lmmods.runs.folder import RunFolder
from tests.finished_runs import TIMED, assert_same_run, rows

FRACTION, MAX_NEW_TOKENS, TEMPERATURE, BETA, RATIO, SEED, LENGTH = 0.5, 7, 1.3, 0.3, 0.25, 7, 64


@pytest.fixture
def student(recipe, llama_of, tmp_path):
    """Return a function that writes a recipe with a 1-layer student and a 2-layer teacher."""
    def write(name: str, **changes) -> tuple[list[str], RunFolder]:
        run = RunFolder(tmp_path / name)
        return recipe(f"{name}.yaml", **{
            "engine": "torch", "model__init_args__quantize": None, "model__init_args__lora": {"rank": 4},
            "model__init_args__config_overrides": {"attention_dropout": 0.0},
            "model__init_args__teacher": {"pretrained": str(llama_of(2)), "beta": BETA, "ratio": RATIO,
                                          "on_policy": FRACTION, "max_new_tokens": MAX_NEW_TOKENS,
                                          "sampling_temperature": TEMPERATURE},
            "data__init_args__max_length": LENGTH, "data__init_args__template": "plain",
            "trainer__val_check_interval": 6, "trainer__default_root_dir": str(run.root), **changes}), run

    return write


def sample_answer(model, prompt, uniforms, end):
    """Sample tokens by inverting the cumulative probabilities, one at a time and without a cache."""
    tokens = []
    for uniform in uniforms:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        cumulative = (logits.double() / TEMPERATURE).softmax(-1).cumsum(-1).numpy()
        tokens.append(int(np.argmax(cumulative > uniform)))
        if tokens[-1] == end:
            break
    return tokens


def compute_first_step(source, student, teacher):
    """Compute the first step's metrics with transformers' models, `sample_answer` and TRL's divergence."""
    pytest.importorskip("trl", reason="an extra of developers (dev)")
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDTrainer

    student_model, teacher_model = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
                                    for folder in (student, teacher))
    data = SFTData(source=source, val_size=4, template="plain", max_length=LENGTH, batch_size=4)
    data.connect(pretrained=str(student), seed=SEED)
    data.prepare_data()
    data.setup("fit")
    order, items = data.train_batches(), data.items("train")
    divergence = cross_entropy = 0.0
    num_targets = {True: 0, False: 0}
    total = 0.0
    for row_index in order._order_of(0, order._rule)[0]:
        item = items[row_index]
        first, *uniforms = sampling_uniforms(SEED, [row_index], 1 + MAX_NEW_TOKENS, step=0)[0]
        is_sampled, length = bool(first < FRACTION), int(item["prompt_length"])
        ids, labels = item["input_ids"].tolist(), item["labels"].tolist()
        if is_sampled:
            answer = sample_answer(student_model, ids[:length], uniforms, data.tokenizer.eos_token_id)
            ids, labels = [*ids[:length], *answer], [*[-100] * length, *answer]
        with torch.no_grad():
            student_logits, teacher_logits = (model(torch.tensor([ids])).logits[:, :-1]
                                              for model in (student_model, teacher_model))
        targets = torch.tensor([labels[1:]])
        divergence_sum = GKDTrainer.generalized_jsd_loss(student_logits, teacher_logits, targets, BETA,
                                                         reduction="sum").item()
        num_targets[is_sampled] += int((targets != -100).sum())
        divergence += divergence_sum
        if is_sampled:
            total += divergence_sum
        else:
            cross_entropy_sum = torch.nn.functional.cross_entropy(student_logits[0], targets[0], reduction="sum").item()
            cross_entropy += cross_entropy_sum
            total += RATIO * divergence_sum + (1 - RATIO) * cross_entropy_sum
    assert all(num_targets.values())
    total_targets = sum(num_targets.values())
    return {"train/loss": total / total_targets, "train/divergence": divergence / total_targets,
            "train/cross_entropy": cross_entropy / num_targets[False], "train/drawn": num_targets[True] / total_targets}


@pytest.mark.slow
def test_both_engines_sample_the_same_answers_under_any_split_and_resume(student, llama_of, instructions, stop_at):
    """A run stopped in the middle of a step samples its answers again and ends with the same bits."""
    changes = {"data__init_args__batch_size": 2, "trainer__accumulate_grad_batches": 2,
               "trainer__val_check_interval": 12}
    arguments, whole = student("torch", **changes)
    assert main(["fit", *arguments]) == 0
    metrics = rows(whole)
    for name, value in compute_first_step(str(instructions), llama_of(1), llama_of(2)).items():
        assert metrics[0][name] == pytest.approx(value, rel=1e-5), name
    arguments, broken = student("broken", **changes)
    stop_at(5)
    assert main(["fit", *arguments]) == 130
    stop_at(0)
    assert main(["fit", *arguments, "--ckpt_path", "last"]) == 0
    assert_same_run(whole, broken)
    arguments, jax_run = student("jax", engine="jax")
    assert main(["fit", *arguments]) == 0
    jax_rows, torch_rows = (rows(run, TIMED | {"train/epoch"}) for run in (jax_run, whole))
    assert len(jax_rows) == len(torch_rows) == 6
    for row, expected in zip(jax_rows, torch_rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
        assert 0 < row["train/drawn"] < 1
