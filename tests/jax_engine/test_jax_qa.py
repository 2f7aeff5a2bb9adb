"""Question answering on JAX: the same scores, whichever process computed a window."""

import csv
import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForQuestionAnswering, AutoTokenizer

from jax_engine.tasks.qa import QA
from jax_engine.trainer import Evaluation
from lmmods.cli import main
from lmmods.core.hf_config import tells_token_types
from lmmods.runs.folder import RunFolder
from lmmods.torch_engine.nn.summary import training_flops
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.data.test_qa import squad
from tests.forks import together, train

BERT = {"model_type": "bert", "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64}


def train_and_print_metrics(*arguments: str) -> None:
    """Train, and print this process's metrics of each validation."""
    evaluate = Evaluation.evaluate

    def evaluate_and_print(self, *args, **kwargs):
        metrics = evaluate(self, *args, **kwargs)
        print("measured " + json.dumps(metrics, sort_keys=True), flush=True)
        return metrics

    Evaluation.evaluate = evaluate_and_print
    train(*arguments)


@pytest.fixture
def qa(recipe, bert_folder, tmp_path):  # noqa: F811
    """Return a function that writes a recipe with 51 windows in 17 micro-batches and its own run folder."""
    def write(folder: str, **changes) -> tuple[RunFolder, list[str]]:
        source = squad(tmp_path)
        run = RunFolder(tmp_path / folder)
        return run, recipe(f"{folder}.yaml", **{
            "engine": "jax", "trainer__max_steps": 4, "trainer__default_root_dir": str(run.root),
            "model": {"class_path": "QA", "init_args": {"config": BERT, "optimizer": {"lr": 3e-3}}},
            "data": {"class_path": "QAData", "init_args": {
                "tokenizer": str(bert_folder), "source": source, "val_source": source, "max_length": 64, "stride": 16,
                "question_max_length": 16, "batch_size": 3, "pad_to_multiple_of": 64}}, **changes})

    return write


@pytest.mark.slow
def test_two_processes_score_all_windows_and_agree(qa):
    stopping = [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "patience": 1,
                                                              "min_delta": 100.0}}]
    single, arguments = qa("one", trainer__accumulate_grad_batches=2, trainer__val_check_interval=1,
                           trainer__callbacks=stopping)
    assert main(["fit", *arguments]) == 0
    two, arguments = qa("two", trainer__val_check_interval=1, trainer__callbacks=stopping)
    outputs = together(["fit", *arguments], 2, program=train_and_print_metrics)
    measured = [[json.loads(line[9:]) for line in output.splitlines() if line.startswith("measured ")]
                for output in outputs]
    assert len(measured[0]) == 2 and measured[0] == measured[1]
    metrics = [json.loads(run.metrics_json.read_text()) for run in (single, two)]
    for name in ("val/loss", "val/exact_match", "val/f1"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-5)
        assert metrics[1][name] == measured[0][-1][name]
    predictions = [json.loads((run.root / "predictions.json").read_text()) for run in (single, two)]
    assert predictions[0] == predictions[1] and len(predictions[0]) == 4


NO_TYPES = {
    "distilbert": {"dim": 24, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 64,
                   "dropout": 0.0, "attention_dropout": 0.0, "qa_dropout": 0.0},
    "roberta": {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                "max_position_embeddings": 72, "type_vocab_size": 1, "pad_token_id": 0, "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0},
    "gpt2": {"n_embd": 24, "n_layer": 1, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", NO_TYPES)
def test_models_without_token_types_accept_a_tokenizer_that_has_them(qa, bert_folder, tmp_path, model_type):  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    assert tokenizer.backend_tokenizer.encode("a", "b").type_ids == [0, 0, 0, 1, 1]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**NO_TYPES[model_type], vocab_size=len(tokenizer) + 8)
    network = AutoModelForQuestionAnswering.from_config(config)
    network.save_pretrained(tmp_path / "model")
    losses = []
    for engine in ("torch", "jax"):
        run, arguments = qa(engine, engine=engine, model__init_args={"pretrained": str(tmp_path / "model"),
                                                                     "optimizer": {"lr": 1e-3}})
        assert main(["fit", *arguments]) == 0
        with open(run.metrics_csv, newline="") as file:
            losses.append([float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len(losses[0]) == 4


@pytest.mark.parametrize(("fields", "has_types"), [
    ({"model_type": "bert"}, True), ({"model_type": "albert"}, True), ({"model_type": "electra"}, True),
    ({"model_type": "roberta", "type_vocab_size": 1}, False), ({"model_type": "distilbert"}, False),
    ({"model_type": "distilbert", "type_vocab_size": 2}, False), ({"model_type": "gpt2"}, False),
    ({"model_type": "deberta-v2"}, False), ({"model_type": "deberta-v2", "type_vocab_size": 2}, True),
    ({"model_type": "custom code"}, True),
])
def test_a_configuration_shows_whether_a_model_has_token_types(fields, has_types):
    assert tells_token_types(fields) is has_types


def test_flops_exclude_the_output_layer(make_ref):
    """The head for spans uses no token table, tied or not."""
    ref = make_ref("bert", "qa")
    task = QA(pretrained=str(ref.folder))
    task.network = ref.net
    sizes = {name: parameter.numel() for name, parameter in ref.torch.named_parameters()}
    expected = 6 * sum(sizes.values()) - 6 * sizes["bert.embeddings.word_embeddings.weight"]
    assert ref.config.tie_word_embeddings
    assert task.flops_per_token(ref.params, {}) == training_flops(ref.torch) == expected
