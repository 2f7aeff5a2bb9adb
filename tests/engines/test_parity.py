"""`inspect --parity true`: both engines on the first rows of a recipe, and its report of differences."""

import json
import re
import weakref

import numpy as np
import pytest

from lmmods.cli import main
from lmmods.core import parity
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.data.test_qa import squad

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "initializer_range": 0.2}
MIXTRAL = {"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
           "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "initializer_range": 0.2}
BERT = {"model_type": "bert", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
LORA = {"rank": 2, "targets": ["q_proj", "down_proj"], "dropout": 0.2}


@pytest.fixture
def compare(recipe, llama_folder, tmp_path, bert_folder, tokenizer_folder, capsys):  # noqa: F811, PLR0913
    """Return a function that compares the engines on a task's recipe and returns status and output."""
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join(f"the quick brown fox jumps over {n} lazy dogs" * (1 + n % 3) for n in range(12)))
    answers = [(f"Count from {n}.", f"{n} and {n + 1} " * (1 + n % 3), "dogs " * (1 + n % 4)) for n in range(8)]
    pairs, labelled = tmp_path / "pairs.jsonl", tmp_path / "judged.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n"
                             for prompt, chosen, rejected in answers))
    labelled.write_text("".join(json.dumps({"prompt": prompt, "completion": chosen, "label": n % 2 == 0}) + "\n"
                                for n, (prompt, chosen, _) in enumerate(answers)))
    text_data = {"source": str(texts), "documents": "paragraph", "max_length": 48}
    answer_data = {"max_length": 64, "template": "alpaca"}

    def run_parity(task: str, *options: str, model: dict | None = None, data: dict | None = None, **changes):
        fields, rows = {
            "SFT": ({"pretrained": str(llama_folder)}, {}),
            "CLM": ({"config": GPT2}, {**text_data, "tokenizer": str(tokenizer_folder)}),
            "MLM": ({"config": BERT}, {**text_data, "tokenizer": bert_folder}),
            "QA": ({"config": BERT}, {"source": squad(tmp_path), "max_length": 48, "stride": 16,
                                      "question_max_length": 16, "tokenizer": bert_folder}),
            "Preference": ({"pretrained": str(llama_folder)}, {
                **answer_data, "source": str(labelled if (model or {}).get("loss") == "kto" else pairs)}),
            "GRPO": ({"pretrained": str(llama_folder), "rewards": [{"name": "f1"}], "max_new_tokens": 8},
                     {**answer_data, "source": str(labelled)}),
        }[task]
        changes["model"] = {"class_path": task, "init_args": {**fields, **(model or {})}}
        if rows:
            changes["data"] = {"class_path": "PromptData" if task == "GRPO" else f"{task}Data", "init_args": rows}
        arguments = recipe(**changes, **{f"data__init_args__{key}": value for key, value in (data or {}).items()})
        capsys.readouterr()
        status = main(["inspect", *arguments, "--parity", "true", *options])
        output = capsys.readouterr()
        return status, output.out + output.err

    return run_parity


@pytest.mark.parametrize(("task", "model", "data"), [
    ("SFT", {"quantize": "nf4", "lora": LORA}, {}),
    pytest.param("SFT", {"quantize": "int8", "lora": LORA}, {}, marks=pytest.mark.slow),
    pytest.param("SFT", {}, {"packing": True, "max_length": 128}, marks=pytest.mark.slow),
    ("CLM", {}, {}),
    pytest.param("CLM", {"config": MIXTRAL, "balance_loss": 0.5}, {}, marks=pytest.mark.slow),
    ("MLM", {}, {}),
    pytest.param("QA", {}, {}, marks=pytest.mark.slow),
    ("Preference", {"lora": LORA}, {}),
    pytest.param("Preference", {"loss": "kto", "lora": LORA}, {}, marks=pytest.mark.slow),
    pytest.param("GRPO", {"lora": LORA, "beta": 0.1, "num_iterations": 2, "prompts_per_step": 99}, {},
                 marks=pytest.mark.slow),
], ids=["sft-qlora", "sft-int8", "sft-packed", "clm", "experts", "mlm", "qa", "dpo", "kto", "grpo"])
def test_the_engines_pass_parity_on_every_task(compare, task, model, data):
    status, output = compare(task, model=model, data=data)
    assert status == 0, output
    assert re.search("^Parity: pass", output, re.M) and output.count(": pass, tolerance") == 3
    matches = re.findall(r"^(\w+) +differs? by .*?, relative ([\d.e+-]+)", output, re.M)
    differences = {quantity: float(value) for quantity, value in matches}
    assert differences.keys() == parity.TOLERANCES.keys() and max(differences.values()) < 1e-4
    assert differences["logits"] > 0  # two programs were compared, not one with itself
    assert bool(re.search("the recipe's .*adapter", output)) is ("lora" in model)
    assert (f"quantize: {model.get('quantize')}" in output) is ("quantize" in model)


@pytest.mark.slow
def test_keys_of_one_engine_only_are_ignored_in_parity(compare):
    """They do not change results; parity sets precision and engine itself."""
    status, output = compare("SFT", "--rows", "2", engine="jax", model={"lora": LORA, "gradient_checkpointing": True},
                             trainer__precision="bf16-mixed", trainer__strategy={"class_path": "MeshSharding"})
    assert status == 0 and "the first 2 training rows" in output and "instead of trainer.precision" in output, output
    status, output = compare("Preference", "--rows", "1", model={
        "optimizer": {"name": "adamw_8bit"}, "piece_tokens": 64, "compile": True, "reference": "cache",
        "generation": {"penalty_alpha": 0.6, "top_k": 4}}, trainer__min_steps=2)
    assert status == 0 and "the first 1 training rows" in output, output


def test_a_difference_is_reported_with_its_parameter(compare, monkeypatch):
    """One engine has another epsilon in its norms, as with a wrong constant in the model."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    monkeypatch.setattr(LlamaRMSNorm, "forward", _with_other_epsilon(LlamaRMSNorm.forward))
    status, out = compare("SFT", model={"lora": LORA})
    assert status == 1
    assert re.search(r"^logits +differ by .*: FAIL, tolerance 1e-04$", out, re.M)
    assert re.search(r"^gradient +differs by .* \(base_model\.model\..*lora_[AB]\.default\.weight\): FAIL", out, re.M)
    assert re.search("^Parity: FAIL", out, re.M)


def _with_other_epsilon(forward):
    def forward_with_other_epsilon(norm, hidden):
        norm.variance_epsilon = 1e-2
        return forward(norm, hidden)

    return forward_with_other_epsilon


def test_a_wrong_gradient_is_found_where_logits_and_loss_agree(compare, monkeypatch):
    """One weight's gradient is wrong."""
    from jax_engine.models.network import Network

    to_torch = Network.to_torch

    def convert_wrongly(network, tree, plain=False):
        weights = to_torch(network, tree, plain)
        name = "transformer.h.0.mlp.c_fc.weight"
        return {**weights, name: weights[name] * 1.01}

    monkeypatch.setattr(Network, "to_torch", convert_wrongly)
    status, output = compare("CLM")
    assert status == 1 and output.count(": pass, tolerance") == 2
    assert re.search(r"gradient .* relative 1\.0e-02 \(transformer\.h\.0\.mlp\.c_fc\.weight\): FAIL", output)


def test_only_one_model_is_in_memory_at_a_time(compare, monkeypatch):
    from jax_engine.tasks.clm import CLM as JaxCLM
    from lmmods.torch_engine.tasks.clm import CLM

    models, is_alive = [], []
    ready, build = CLM.on_model_ready, JaxCLM.build
    monkeypatch.setattr(CLM, "on_model_ready", lambda task: models.append(weakref.ref(task.model)) or ready(task))

    def watch_build(task, *args):
        is_alive.extend(model() is not None for model in models)
        return build(task, *args)

    monkeypatch.setattr(JaxCLM, "build", watch_build)
    assert compare("CLM")[0] == 0
    assert is_alive == [False]


@pytest.mark.parametrize(("options", "model", "message"), [
    ((), {"config": {"model_type": "opt", "hidden_size": 16}}, "'opt' is not supported by the JAX engine"),
    (("--which", "longest"), {}, "Remove --which and --recipe"),
    (("--recipe", "true"), {}, "Remove --which and --recipe"),
    (("--rows", "0"), {}, "--rows is 0, but must be 1 or more"),
])
def test_what_parity_does_not_support_is_rejected_before_loading(compare, llama_folder, monkeypatch, options, model,
                                                                    message):
    from lmmods.torch_engine.trainer import Trainer

    monkeypatch.setattr(Trainer, "measure", None)
    if "pretrained" in model:
        model = {**model, "pretrained": str(llama_folder)}
    status, output = compare("CLM", *options, model=model)
    assert status == 2 and output.count("error: ") == 1 and message in output


# What is compared ----------------------------------------------------------------------------------------------------

GRADIENTS = {"a": np.array([1.0, -4.0], np.float32), "b": np.array([2e-5], np.float32)}


def write_results(folder, loss=2.0, logits=((1.0, 5.0),), gradients=GRADIENTS):
    folder.mkdir(exist_ok=True)
    parity.write(folder, loss, 3.0, np.array(logits, np.float32), gradients)
    return folder


@pytest.mark.parametrize(("changes", "quantity", "absolute", "relative", "name"), [
    ({"loss": 2.1}, "loss", 0.1, 0.05, ""),
    ({"loss": float("nan")}, "loss", None, None, ""),
    ({"logits": ((1.5, 5.0),)}, "logits", 0.5, 0.1, ""),
    ({"logits": ((1.0, 5.0, 0.0),)}, "logits", np.inf, np.inf, ""),
    ({"gradients": GRADIENTS | {"a": np.array([1.0, -4.1], np.float32)}}, "gradient", 0.1, 0.025, "a"),
    # small gradients are compared relative to a thousandth of the largest
    ({"gradients": GRADIENTS | {"b": np.array([6e-5], np.float32)}}, "gradient", 4e-5, 0.01, "b"),
    ({"gradients": GRADIENTS | {"a": np.array([1.0, np.nan], np.float32)}}, "gradient", None, None, "a"),
    ({"gradients": {"a": GRADIENTS["a"]}}, "gradient", np.inf, np.inf, "b"),
])
def test_differences_equal_values_computed_by_hand(tmp_path, changes, quantity, absolute, relative, name):
    differences = parity.compare(write_results(tmp_path / "torch"), write_results(tmp_path / "jax", **changes))
    assert [difference.quantity for difference in differences if not difference.passes] == [quantity]
    worst, = (difference for difference in differences if difference.quantity == quantity)
    assert worst.name == name and "FAIL" in str(worst)
    for actual, expected in ((worst.absolute, absolute), (worst.relative, relative)):
        assert actual == pytest.approx(expected, rel=1e-4) if expected is not None else np.isnan(actual)
    same = parity.compare(tmp_path / "torch", write_results(tmp_path / "again"))
    assert all(difference.passes and difference.absolute == 0 for difference in same)


def test_compared_positions_are_not_padding_and_spread_out():
    mask = np.zeros((1, 2, 600), int)
    mask[0, 0, :500] = mask[0, 1, 100:] = 1
    positions = parity.compared_positions({"attention_mask": mask}, 4)
    assert len(positions) == parity.POSITIONS // 4 and (np.diff(positions) > 0).all()
    assert (positions[0], positions[-1]) == (0, 1199) and mask.ravel()[positions].all()


def test_rows_without_targets_are_rejected(tmp_path):
    with pytest.raises(parity.UserError, match="these rows have no targets"):
        parity.write(tmp_path, float("nan"), 0.0, np.zeros((1, 2)), {})
