"""`inspect --parity true`: both engines on the first rows of a recipe, and what it says where they differ."""

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
def compared(recipe, llama_folder, tmp_path, bert_folder, tokenizer_folder, capsys):  # noqa: F811, PLR0913
    """A function that compares the engines on a task's recipe; returns status and what was printed."""
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join(f"the quick brown fox jumps over {n} lazy dogs" * (1 + n % 3) for n in range(12)))
    answers = [(f"Count from {n}.", f"{n} and {n + 1} " * (1 + n % 3), "dogs " * (1 + n % 4)) for n in range(8)]
    pairs, judged = tmp_path / "pairs.jsonl", tmp_path / "judged.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": prompt, "chosen": good, "rejected": bad}) + "\n"
                             for prompt, good, bad in answers))
    judged.write_text("".join(json.dumps({"prompt": prompt, "completion": good, "label": n % 2 == 0}) + "\n"
                              for n, (prompt, good, _) in enumerate(answers)))
    text_data = {"source": str(texts), "documents": "paragraph", "max_length": 48}
    answer_data = {"max_length": 64, "template": "alpaca"}

    def run(task: str, *options: str, model: dict | None = None, data: dict | None = None, **changes):
        fields, rows = {
            "SFT": ({"pretrained": str(llama_folder)}, {}),
            "CLM": ({"config": GPT2}, {**text_data, "tokenizer": str(tokenizer_folder)}),
            "MLM": ({"config": BERT}, {**text_data, "tokenizer": bert_folder}),
            "QA": ({"config": BERT}, {"source": squad(tmp_path), "max_length": 48, "stride": 16,
                                      "question_max_length": 16, "tokenizer": bert_folder}),
            "Preference": ({"pretrained": str(llama_folder)}, {
                **answer_data, "source": str(judged if (model or {}).get("loss") == "kto" else pairs)}),
            "GRPO": ({"pretrained": str(llama_folder), "rewards": [{"name": "f1"}], "max_new_tokens": 8},
                     {**answer_data, "source": str(judged)}),
        }[task]
        changes["model"] = {"class_path": task, "init_args": {**fields, **(model or {})}}
        if rows:
            changes["data"] = {"class_path": "PromptData" if task == "GRPO" else f"{task}Data", "init_args": rows}
        arguments = recipe(**changes, **{f"data__init_args__{key}": value for key, value in (data or {}).items()})
        capsys.readouterr()
        status = main(["inspect", *arguments, "--parity", "true", *options])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


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
def test_engines_agree_on_every_task(compared, task, model, data):
    status, said = compared(task, model=model, data=data)
    assert status == 0, said
    assert re.search("^Parity: pass", said, re.M) and said.count(": pass, tolerance") == 3
    found = {kind: float(number) for kind, number in re.findall(r"^(\w+) +differs? by .*?, relative ([\d.e+-]+)", said,
                                                                re.M)}
    assert found.keys() == parity.TOLERANCES.keys() and max(found.values()) < 1e-4
    assert found["logits"] > 0  # two programs, not one compared with itself
    assert bool(re.search("the recipe's .*adapter", said)) is ("lora" in model)
    assert (f"quantize: {model.get('quantize')}" in said) is ("quantize" in model)


@pytest.mark.slow
def test_what_one_engine_alone_has_is_left_out(compared):
    """Of keys that change no number; precision and engine are those of the comparison."""
    status, said = compared("SFT", "--rows", "2", engine="jax", model={"lora": LORA, "gradient_checkpointing": True},
                            trainer__precision="bf16-mixed", trainer__strategy={"class_path": "MeshSharding"})
    assert status == 0 and "the first 2 training rows" in said and "instead of trainer.precision" in said, said
    status, said = compared("Preference", "--rows", "1", model={
        "optimizer": {"name": "adamw_8bit"}, "piece_tokens": 64, "compile": True, "reference": "cache",
        "generation": {"penalty_alpha": 0.6, "top_k": 4}}, trainer__min_steps=2)
    assert status == 0 and "the first 1 training rows" in said, said


def test_a_difference_is_found_and_named(compared, monkeypatch):
    """Another epsilon in the norms of one engine, as a wrong constant in its network would be."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    monkeypatch.setattr(LlamaRMSNorm, "forward", _with_other_epsilon(LlamaRMSNorm.forward))
    status, said = compared("SFT", model={"lora": LORA})
    assert status == 1
    assert re.search(r"^logits +differ by .*: FAIL, tolerance 1e-04$", said, re.M)
    assert re.search(r"^gradient +differs by .* \(base_model\.model\..*lora_[AB]\.default\.weight\): FAIL", said, re.M)
    assert re.search("^Parity: FAIL", said, re.M)


def _with_other_epsilon(forward):
    def other(norm, hidden):
        norm.variance_epsilon = 1e-2
        return forward(norm, hidden)

    return other


def test_a_wrong_gradient_alone_is_found(compared, monkeypatch):
    """Of one weight, where logits and loss agree."""
    from jax_engine.models.network import Network

    to_torch = Network.to_torch

    def wrong(network, tree, plain=False):
        found = to_torch(network, tree, plain)
        name = "transformer.h.0.mlp.c_fc.weight"
        return {**found, name: found[name] * 1.01}

    monkeypatch.setattr(Network, "to_torch", wrong)
    status, said = compared("CLM")
    assert status == 1 and said.count(": pass, tolerance") == 2
    assert re.search(r"gradient .* relative 1\.0e-02 \(transformer\.h\.0\.mlp\.c_fc\.weight\): FAIL", said)


def test_one_network_at_a_time_is_in_memory(compared, monkeypatch):
    from jax_engine.tasks.clm import CLM as JaxCLM
    from lmmods.torch_engine.tasks.clm import CLM

    networks, alive = [], []
    ready, build = CLM.on_model_ready, JaxCLM.build
    monkeypatch.setattr(CLM, "on_model_ready", lambda task: networks.append(weakref.ref(task.model)) or ready(task))

    def watched(task, *args):
        alive.extend(network() is not None for network in networks)
        return build(task, *args)

    monkeypatch.setattr(JaxCLM, "build", watched)
    assert compared("CLM")[0] == 0
    assert alive == [False]


@pytest.mark.parametrize(("options", "model", "message"), [
    ((), {"config": {"model_type": "opt", "hidden_size": 16}}, "'opt' is not supported by the JAX engine"),
    (("--which", "longest"), {}, "Remove --which and --recipe"),
    (("--recipe", "true"), {}, "Remove --which and --recipe"),
    (("--rows", "0"), {}, "--rows is 0, but must be 1 or more"),
])
def test_what_cannot_be_compared_is_said_before_anything_is_loaded(compared, llama_folder, monkeypatch, options, model,
                                                                    message):
    from lmmods.torch_engine.trainer import Trainer

    monkeypatch.setattr(Trainer, "measure", None)
    if "pretrained" in model:
        model = {**model, "pretrained": str(llama_folder)}
    status, said = compared("CLM", *options, model=model)
    assert status == 2 and said.count("error: ") == 1 and message in said


# What is compared ----------------------------------------------------------------------------------------------------

GRADIENTS = {"a": np.array([1.0, -4.0], np.float32), "b": np.array([2e-5], np.float32)}


def written(folder, loss=2.0, logits=((1.0, 5.0),), gradients=GRADIENTS):
    folder.mkdir(exist_ok=True)
    parity.write(folder, loss, 3.0, np.array(logits, np.float32), gradients)
    return folder


@pytest.mark.parametrize(("changes", "what", "absolute", "relative", "name"), [
    ({"loss": 2.1}, "loss", 0.1, 0.05, ""),
    ({"loss": float("nan")}, "loss", None, None, ""),
    ({"logits": ((1.5, 5.0),)}, "logits", 0.5, 0.1, ""),
    ({"logits": ((1.0, 5.0, 0.0),)}, "logits", np.inf, np.inf, ""),
    ({"gradients": GRADIENTS | {"a": np.array([1.0, -4.1], np.float32)}}, "gradient", 0.1, 0.025, "a"),
    # small ones are measured against a thousandth of the largest
    ({"gradients": GRADIENTS | {"b": np.array([6e-5], np.float32)}}, "gradient", 4e-5, 0.01, "b"),
    ({"gradients": GRADIENTS | {"a": np.array([1.0, np.nan], np.float32)}}, "gradient", None, None, "a"),
    ({"gradients": {"a": GRADIENTS["a"]}}, "gradient", np.inf, np.inf, "b"),
])
def test_differences_by_hand(tmp_path, changes, what, absolute, relative, name):
    found = parity.compare(written(tmp_path / "torch"), written(tmp_path / "jax", **changes))
    assert [each.quantity for each in found if not each.passes] == [what]
    worst, = (each for each in found if each.quantity == what)
    assert worst.name == name and "FAIL" in str(worst)
    for number, wanted in ((worst.absolute, absolute), (worst.relative, relative)):
        assert number == pytest.approx(wanted, rel=1e-4) if wanted is not None else np.isnan(number)
    same = parity.compare(tmp_path / "torch", written(tmp_path / "again"))
    assert all(each.passes and each.absolute == 0 for each in same)


def test_compared_positions_are_real_and_spread():
    mask = np.zeros((1, 2, 600), int)
    mask[0, 0, :500] = mask[0, 1, 100:] = 1
    places = parity.compared_positions({"attention_mask": mask}, 4)
    assert len(places) == parity.POSITIONS // 4 and (np.diff(places) > 0).all()
    assert (places[0], places[-1]) == (0, 1199) and mask.ravel()[places].all()


def test_rows_without_anything_scored_are_refused(tmp_path):
    with pytest.raises(parity.UserError, match="these rows have no targets"):
        parity.write(tmp_path, float("nan"), 0.0, np.zeros((1, 2)), {})
