"""Preference optimisation on torch: gradients equal autograd and TRL, any batch split, references, whole runs."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from lmmods.cli import main
from lmmods.core.preference_losses import METHODS
from lmmods.core.settings import LoRA
from lmmods.data.preference import PreferenceData
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.building import build_network
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.nn.lm_head import LMHead, causal_logps
from lmmods.torch_engine.nn.loss import token_log_probs
from lmmods.torch_engine.nn.micro_batches import split_rows
from lmmods.torch_engine.nn.reference import Reference
from lmmods.torch_engine.tasks.preference import Preference
from tests.closeness import Float64, assert_as_close, in_both
from tests.finished_runs import assert_same_run, rows

ALONE = SimpleNamespace(  # what a step needs of a trainer
    precision_plugin=SimpleNamespace(forward_context=nullcontext),
    strategy=SimpleNamespace(batch_to_device=lambda batch: batch, reduce=lambda sums, reduce_op: sums))


def make_settings(loss: str) -> dict:
    smoothed = {"label_smoothing": 0.1} if METHODS[loss].smooths else {}
    weights = {"sft_weight": 0.3} if METHODS[loss].is_paired else {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    return {"loss": loss, **smoothed, **weights}


@pytest.fixture
def plain_llama(llama_folder, tmp_path):
    """Folder of the tiny Llama without dropout."""
    folder = Path(shutil.copytree(llama_folder, tmp_path / "plain"))
    config = (folder / "config.json").read_text().replace('"attention_dropout": 0.1', '"attention_dropout": 0.0')
    (folder / "config.json").write_text(config)
    return folder


def make_task(folder, data_path, answers=None, seed=3, **fields) -> tuple[Preference, dict[str, torch.Tensor]]:
    """Return a task without a trainer, with weights that differ from its reference, and all rows as one batch."""
    task = Preference(pretrained=str(folder), **fields)
    data = PreferenceData(source=data_path, max_length=200, batch_size=16, shuffle=False, template="alpaca")
    data.connect(pretrained=str(folder), seed=7, answers=answers or task.answers)
    data.prepare_data()
    data.setup("fit")
    task.model = build_network(task, task.auto_class, task.task_type, data, precision="32-true",
                               device=torch.device("cpu"), seed=7)
    task.head = LMHead.from_model(task.model, plain=not task.fast_kernels)
    task._dropout, task._trainer = TokenDropout.from_model(task.model), ALONE
    if task.reference_kind is not None:
        task._reference = Reference(task.model, task.reference_kind, task.trainable())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in task.trainable().values():
            param += 0.02 * torch.randn(param.shape, generator=generator)
    return task, next(iter(data.train_batches()))


def compute_gradients(task, batches) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss over all batches, and its gradient."""
    task.zero_grad()
    task._baseline = task._compute_baseline(batches) if task._has_baseline else None
    dropout, totals = TokenDropout.from_model(task.model), torch.zeros(2)
    for batch in batches:
        dropout.begin(batch)
        sums = task(task.batch_loss, task.complete(batch))
        sums.total.backward()
        totals += torch.stack([sums.total.detach(), sums.weight])
    return (totals[0] / totals[1]).item(), {name: param.grad / totals[1] for name, param in task.trainable().items()
                                            if param.grad is not None}


def relative_error(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert result.keys() == expected.keys()
    difference, norm = (sum(part.double().square().sum() for part in parts)
                        for parts in (((result[name] - expected[name]) for name in expected), expected.values()))
    return (difference / norm).sqrt().item()


# Log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["matrix", "any", "plain"])
def test_chunked_log_probabilities_and_gradients_equal_full_logits(head, monkeypatch):
    torch.manual_seed(0)
    hidden, layer = torch.randn(23, 16, requires_grad=True), torch.nn.Linear(16, 40, bias=False)
    targets, coefficients = torch.randint(40, (23,)), torch.randn(23)
    monkeypatch.setattr("lmmods.torch_engine.nn.loss.CHUNK_BYTES", 5 * 4 * 40)
    monkeypatch.setattr("lmmods.torch_engine.nn.loss.MIN_CHUNK", 1)

    class Head:
        linear = layer if head == "matrix" else None

        def __call__(self, x):
            return 3 * torch.tanh(layer(x) / 3) if head != "matrix" else layer(x)

    def whole(layer):
        x = hidden.detach().to(layer.weight.dtype).requires_grad_()
        logits = layer(x) if head == "matrix" else 3 * torch.tanh(layer(x) / 3)
        logps_by_autograd = F.log_softmax(logits, -1)[torch.arange(23), targets]
        return logps_by_autograd, torch.autograd.grad((logps_by_autograd * coefficients).sum(), [x, layer.weight])

    (expected, expected_grads), (exact, exact_grads) = in_both(whole, layer)
    logps = token_log_probs(hidden, targets, Head(), [layer.weight], 40, head == "plain")
    assert_as_close(logps, expected, exact)
    assert_as_close(torch.autograd.grad((logps * coefficients).sum(), [hidden, layer.weight]), expected_grads,
                    exact_grads)


def test_log_probabilities_are_summed_over_target_tokens(llama_folder, pairs):
    task, batch = make_task(llama_folder, pairs, loss="simpo")
    task.eval()
    flat = {name: values.flatten(0, 1) for name, values in batch.items()}
    logps, lengths = causal_logps(task.model, task.head, flat)
    labels = flat["labels"][:, 1:]

    def whole(model):
        logits = model(input_ids=flat["input_ids"], attention_mask=flat["attention_mask"]).logits[:, :-1]
        token_logps = F.log_softmax(logits, -1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2) * (labels >= 0)
        return token_logps.sum(1)

    assert_as_close(logps, *in_both(whole, task.model))
    assert lengths.tolist() == (labels >= 0).sum(1).tolist()


# Any batch split ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", METHODS)
def test_the_gradient_does_not_depend_on_the_batch_split(loss, llama_folder, pairs):
    """With dropout, which only the policy has."""
    task, batch = make_task(llama_folder, pairs, **make_settings(loss), lora=LoRA(rank=4, dropout=0.2), seed=9,
                            config_overrides={"attention_dropout": 0.1})
    whole_loss, whole_gradient = compute_gradients(task, [batch])
    assert loss != "kto" or task._baseline > 0
    num_rows = len(batch["input_ids"])
    for size in (1, 4):
        micro_batches = [{name: values[start : start + size] for name, values in batch.items()}
                         for start in range(0, num_rows, size)]
        split_loss, gradient = compute_gradients(task, micro_batches)
        assert split_loss == pytest.approx(whole_loss, rel=1e-5) and relative_error(gradient, whole_gradient) < 1e-5
    split_loss, gradient = compute_gradients(task, split_rows(batch, 300))
    assert len(split_rows(batch, 300)) > 2
    assert split_loss == pytest.approx(whole_loss, rel=1e-5) and relative_error(gradient, whole_gradient) < 1e-5


def test_dropout_is_off_unless_the_recipe_sets_it(llama_folder):
    """Dropout rates of the model's own config are set to 0."""
    assert Preference(pretrained=str(llama_folder)).overrides == {"attention_dropout": 0.0}
    overrides = {"attention_dropout": 0.2, "hidden_act": "gelu"}
    assert Preference(pretrained=str(llama_folder), config_overrides=overrides).overrides == overrides
    scratch = Preference(config={"model_type": "gpt2", "resid_pdrop": 0.3, "vocab_size": 99})
    assert scratch.overrides == {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}


# References --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "kind"), [
    ({"lora": LoRA(rank=4)}, "base"), ({"lora": LoRA(rank=4), "quantize": "nf4"}, "base"), ({}, "copy"),
    ({"lora": LoRA(rank=4, modules_to_save=["lm_head"]), "reference": "copy"}, "copy"),
    ({"lora": LoRA(rank=4, init="pissa")}, "copy")],
    ids=["lora", "qlora", "full", "modules_to_save", "pissa"])
def test_the_reference_is_the_model_before_training(llama_folder, pairs, fields, kind):
    task, batch = make_task(llama_folder, pairs, **fields)
    assert task.reference_kind == kind
    before = {name: param.detach().clone() for name, param in task.trainable().items()}
    reference_logps = task.complete(batch)["reference_logps"]
    assert task.model.training and all(torch.equal(param, before[name]) for name, param in task.trainable().items())
    assert all(param.requires_grad for param in task.trainable().values())
    policy, _ = task.answer_logps(batch)
    assert (policy - reference_logps).abs().max() > 1e-2
    task.model = (task.model.unload() if "quantize" in fields  # only this base has these codes
                  else AutoModelForCausalLM.from_pretrained(llama_folder)).eval()
    task.head = LMHead.from_model(task.model)
    with torch.no_grad():
        expected, _ = task.answer_logps(batch)
    torch.testing.assert_close(reference_logps, expected, rtol=1e-5, atol=1e-4)


def test_the_reference_of_a_continued_adapter_is_the_saved_adapter(llama_folder, pairs, tmp_path):
    """Its dropout is off."""
    first, batch = make_task(llama_folder, pairs, lora=LoRA(rank=4, dropout=0.3))
    first.model.save_pretrained(tmp_path / "adapter")
    first.model.eval()
    with torch.no_grad():
        expected, _ = first.answer_logps(batch)
    second, _ = make_task(llama_folder, pairs, adapter=str(tmp_path / "adapter"))
    assert second.reference_kind == "copy" and second.model.peft_config["default"].lora_dropout == 0
    assert not any(isinstance(part, torch.nn.Dropout) and part.p for part in second.model.modules())
    torch.testing.assert_close(second.complete(batch)["reference_logps"], expected)


# TRL ---------------------------------------------------------------------------------------------------------------

DPO = [name for name in METHODS if METHODS[name].has_reference and METHODS[name].is_paired]


def extract_answers(batch, prompt_length=None) -> list[dict[str, list[int]]]:
    """Return each pair's prompt and answers in TRL's form, with at most the last `prompt_length` prompt tokens."""
    pairs = []
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        start = int((labels[0] >= 0).nonzero()[0])
        prompt = ids[0, :start].tolist()
        pairs.append({"prompt_ids": prompt if prompt_length is None else prompt[-prompt_length:],
                      **{name: side[mask >= 0].tolist() for name, side, mask in zip(("chosen_ids", "rejected_ids"), ids,
                                                                                    labels, strict=True)}})
    return pairs


def make_batch(answers) -> dict[str, torch.Tensor]:
    """Return pairs in TRL's form as a batch."""
    sides = [[row["prompt_ids"] + row[name] for name in ("chosen_ids", "rejected_ids")] for row in answers]
    width = max(len(ids) for pair in sides for ids in pair)
    batch = {name: torch.full((len(answers), 2, width), fill) for name, fill in
             (("input_ids", 0), ("labels", -100), ("attention_mask", 0))}
    for row, pair in enumerate(sides):
        for side, ids in enumerate(pair):
            start = len(answers[row]["prompt_ids"])
            batch["input_ids"][row, side, : len(ids)] = torch.tensor(ids)
            batch["labels"][row, side, start : len(ids)] = torch.tensor(ids[start:])
            batch["attention_mask"][row, side, : len(ids)] = 1
    return batch


def compute_trl_gradients(trainer_class, config_class, folder, task, rows, tmp_path, **options) -> list[dict]:
    """Return TRL's gradient in float32 and float64, from a task's weights, with one row per micro-batch."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    gradients = []

    class Probe(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            gradients.append({f"model.{name}": param.grad.clone() for name, param in model.named_parameters()
                              if param.grad is not None})

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = config_class(**{
        "output_dir": str(tmp_path / "trl"), "per_device_train_batch_size": 1, "report_to": [], "max_steps": 1,
        "gradient_accumulation_steps": len(rows), "max_grad_norm": 0.0, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True, "save_strategy": "no", **options})
    # The rows are tokenised already.
    tokenised = type("Tokenised", (trainer_class,), {"_prepare_dataset": lambda self, dataset, *_: dataset})

    def train(dtype: torch.dtype) -> None:
        model, reference = (AutoModelForCausalLM.from_pretrained(folder).to(dtype) for _ in range(2))
        model.load_state_dict(task.model.state_dict())
        tokenised(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
                  callbacks=[Probe()], **({"ref_model": reference} if task.reference_kind else {})).train()

    train(torch.float32)
    with Float64():
        train(torch.float64)
    return gradients


@pytest.fixture
def make_task_and_pairs(plain_llama, pairs):
    """Return a function that returns a task without dropout, whose weights differ from its reference, and its pairs."""
    pytest.importorskip("trl", reason="an extra of developers (dev)")

    def make(**fields):
        task, batch = make_task(plain_llama, pairs, answers="pair", **fields)
        return task, extract_answers(batch, 1 if fields["loss"] == "orpo" else None)

    return make


@pytest.mark.parametrize("loss", DPO)
def test_dpo_losses_equal_trl(loss, make_task_and_pairs, plain_llama, tmp_path):
    from trl import DPOConfig, DPOTrainer

    smoothing = 0.1 if loss in ("robust", "exo_pair") else 0.0  # TRL supports it only for these
    task, rows = make_task_and_pairs(loss=loss, label_smoothing=smoothing)
    expected = compute_trl_gradients(DPOTrainer, DPOConfig, plain_llama, task, rows, tmp_path, loss_type=loss,
                                     label_smoothing=smoothing, max_length=None)
    assert_as_close(compute_gradients(task, [make_batch(rows)])[1], *expected)


@pytest.mark.parametrize("loss", ["simpo", "cpo", "orpo"])
def test_losses_without_a_reference_equal_trl(loss, make_task_and_pairs, plain_llama, tmp_path):
    """TRL's ORPO also trains on the prompt, so there it is one token, which is never a target."""
    if loss == "orpo":
        from trl.experimental.orpo import ORPOConfig as Config
        from trl.experimental.orpo import ORPOTrainer as Trainer

        task, rows = make_task_and_pairs(loss=loss, beta=0.3)
        options = {"beta": 0.3}
    else:
        from trl.experimental.cpo import CPOConfig as Config
        from trl.experimental.cpo import CPOTrainer as Trainer

        task, rows = make_task_and_pairs(loss=loss, **({"gamma": 0.7} if loss == "simpo" else {"label_smoothing": 0.1}),
                                         sft_weight=0.4)
        options = ({"simpo_gamma": 0.7} if loss == "simpo" else {"label_smoothing": 0.1}) | {
            "cpo_alpha": 0.4, "loss_type": "simpo" if loss == "simpo" else "sigmoid"}

    class Tokenised(Trainer):
        def tokenize_row(self, feature, model=None):
            prompt = feature["prompt_ids"]
            features = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
            for name in ("chosen", "rejected"):
                ids = prompt + feature[f"{name}_ids"]
                features |= {f"{name}_input_ids": ids, f"{name}_attention_mask": [1] * len(ids),
                             f"{name}_labels": [-100] * len(prompt) + feature[f"{name}_ids"]}
            return features

    named = [{"prompt": "a", "chosen": "b", "rejected": "c", **row} for row in rows]
    expected = compute_trl_gradients(Tokenised, Config, plain_llama, task, named, tmp_path, **options)
    assert_as_close(compute_gradients(task, [make_batch(rows)])[1], *expected)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_losses_of_single_answers_equal_trl(loss, make_task_and_pairs, plain_llama, tmp_path):
    """One micro-batch, as TRL's KTO computes its baseline per micro-batch. Here it uses the next row's answer."""
    from trl import KTOConfig, KTOTrainer

    task, pairs = make_task_and_pairs(loss=loss, desirable_weight=1.5)
    rows = [{"prompt_ids": row["prompt_ids"], "completion_ids": row[name], "label": name == "chosen_ids"}
            for row in pairs for name in ("chosen_ids", "rejected_ids")]
    rows_with_kl = [{**row, "KL_completion_ids": other["completion_ids"]}
                    for row, other in zip(rows, rows[2:] + rows[:2], strict=True)]
    expected = compute_trl_gradients(KTOTrainer, KTOConfig, plain_llama, task, rows_with_kl, tmp_path, loss_type=loss,
                                     desirable_weight=1.5, max_length=None, per_device_train_batch_size=len(rows),
                                     gradient_accumulation_steps=1)
    batch = make_batch([{"prompt_ids": row["prompt_ids"], "chosen_ids": row["completion_ids"],
                         "rejected_ids": row["KL_completion_ids"]} for row in rows_with_kl])
    batch["desirable"] = torch.tensor([1, 0] * len(pairs))
    if loss != "kto":
        batch = {name: values[:, :1] if values.ndim > 1 else values for name, values in batch.items()}
    assert_as_close(compute_gradients(task, [batch])[1], *expected)
    assert loss != "kto" or task._baseline > 0


# Whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fit(recipe, pairs, tmp_path):
    def run(name, *options, **changes):
        arguments = recipe(**{
            "model__class_path": "Preference", "data__class_path": "PreferenceData", "data__init_args__source": pairs,
            "data__init_args__val_source": pairs, "data__init_args__val_size": 0, "data__init_args__batch_size": 4,
            "trainer__max_steps": 4, "trainer__default_root_dir": str(tmp_path / name), **changes})
        assert main(["fit", *arguments, *options]) == 0
        return RunFolder(tmp_path / name)

    return run


def test_a_run_learns_the_preference_and_logs_rewards(fit):
    """It starts at its reference without dropout: the attention dropout of the tiny Llama is off."""
    run = fit("run", trainer__max_steps=8, model__init_args__sft_weight=0.1, trainer__accumulate_grad_batches=2,
              trainer__val_check_interval=8, checkpoint={"every_n_steps": None},
              model__init_args__optimizer={"lr": 0.02})
    first, last = rows(run)[0], json.loads(run.metrics_json.read_text())
    assert first["train/rewards/margin"] == pytest.approx(0, abs=1e-4)
    for prefix in ("train", "val"):
        assert last[f"{prefix}/rewards/accuracy"] == 1 and last[f"{prefix}/rewards/margin"] > 0.05
        assert last[f"{prefix}/rewards/margin"] == pytest.approx(
            last[f"{prefix}/rewards/chosen"] - last[f"{prefix}/rewards/rejected"], rel=1e-4)
    assert "val/perplexity" not in last and "val/accuracy" not in last


@pytest.mark.slow
def test_a_kto_run_does_not_depend_on_the_batch_split(fit):
    """Undesirable answers have a small weight, so that all become more likely than under the reference, which makes
    the baseline positive."""
    metrics = [rows(fit(f"cut{size}", data__init_args__batch_size=size, trainer__accumulate_grad_batches=8 // size,
                        data__init_args__eval_batch_size=size, trainer__val_check_interval=4,
                        model__init_args__loss="kto", model__init_args__undesirable_weight=0.1)) for size in (8, 2)]
    for step_metrics, expected in zip(*metrics, strict=True):
        assert step_metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert metrics[0][-2]["train/kl"] > 0


@pytest.mark.slow
def test_resumed_full_fine_tuning_equals_an_uninterrupted_run(fit):
    """The reference is a copy of the weights that the run started from."""
    full = {"model__init_args__quantize": None, "model__init_args__lora": None,
            "model__init_args__optimizer": {"lr": 0.001}, "trainer__limit_val_batches": 0}
    whole = fit("whole", **full)
    fit("resumed", **full, trainer__max_steps=2)
    resumed = fit("resumed", "--ckpt_path", "last", **full)
    assert_same_run(resumed, whole)


@pytest.mark.parametrize(("changes", "message"), [
    ({"model__init_args__loss": "aot"}, "sorts the scores of a micro-batch"),
    ({"model__init_args__loss": "dpo"}, "its name here is sigmoid"),
    ({"model__init_args__loss": "simpo", "model__init_args__reference": "copy"}, "has no reference"),
    ({"model__init_args__lora": None, "model__init_args__quantize": None, "model__init_args__reference": "base"},
     "without an adapter"), ({"data__class_path": "SFTData"}, "Set it to PreferenceData")])
def test_invalid_combinations_are_rejected(recipe, pairs, capsys, changes, message):
    assert main(["fit", *recipe(**{
        "model__class_path": "Preference", "data__class_path": "PreferenceData", "data__init_args__source": pairs,
        **changes})]) == 2
    assert message in capsys.readouterr().err
