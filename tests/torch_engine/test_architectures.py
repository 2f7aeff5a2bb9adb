"""Two SGD steps of many architectures, through the whole program, against transformers' loss in a bare loop."""

import copy
import csv
import json
import shutil
from functools import partial

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoTokenizer

from lmmods.cli import main
from lmmods.torch_engine.nn.lm_head import keeps_packed_apart
from lmmods.torch_engine.tasks.base import TaskModule
from tests.closeness import assert_as_close, in_both
from tests.data.conftest import CORPUS
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture
from tests.data.test_qa import squad

LR = 0.1
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 72}
GROUPED = {**SMALL, "num_key_value_heads": 2}
DECODERS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 72, "resid_pdrop": 0, "embd_pdrop": 0,
             "attn_pdrop": 0},
    "llama": GROUPED, "qwen2": GROUPED, "qwen3": {**GROUPED, "head_dim": 8}, "mistral": GROUPED,
    "gemma": {**GROUPED, "head_dim": 8}, "gpt_neox": SMALL, "phi": SMALL,
    "mixtral": {**GROUPED, "num_local_experts": 4}, "gpt_oss": {**GROUPED, "head_dim": 8, "num_local_experts": 4},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 72, "word_embed_proj_dim": 32, "dropout": 0.0},
}
STILL = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS = {
    "bert": STILL, "roberta": STILL, "albert": {**STILL, "embedding_size": 16, "classifier_dropout_prob": 0.0},
    "electra": {**STILL, "embedding_size": 16},
    "deberta-v2": {**STILL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0,
                   "qa_dropout": 0.0, "max_position_embeddings": 72},
}
ONE_SEGMENT = ("roberta", "distilbert", "deberta-v2")  # no token_type_ids, or only zeros


def make_folder(root, name: str, fields: dict, tokenizer_folder, auto_class: str) -> str:
    """Write a random model of this architecture and a tokenizer; return the folder."""
    folder = root / name
    shutil.copytree(tokenizer_folder, folder)
    if name in ENCODERS:  # else AutoTokenizer uses the class and vocabulary type of the model
        inputs = ["input_ids", "attention_mask", *(() if name in ONE_SEGMENT else ("token_type_ids",))]
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    special = {key: getattr(tokenizer, key) or 0 for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**fields, **special, vocab_size=len(tokenizer) + 8)
    getattr(transformers, auto_class).from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def record(monkeypatch):
    """Record of a run: its initial network, its module and its training batches."""
    record = {"batches": []}
    configure, step = TaskModule.configure_model, TaskModule.training_step

    def configure_model(self):
        configure(self)
        record.setdefault("start", copy.deepcopy(self.model))
        record["module"] = self

    def training_step(self, batches, batch_idx):
        record["batches"] += [{key: value for key, value in batch.items() if key != "index"} for batch in batches]
        return step(self, batches, batch_idx)

    monkeypatch.setattr(TaskModule, "configure_model", configure_model)
    monkeypatch.setattr(TaskModule, "training_step", training_step)
    return record


def train_bare_loop(batches: list[dict[str, torch.Tensor]], network: torch.nn.Module) -> tuple[list, dict]:
    """Return the loss of each batch and the final parameters."""
    optimizer, losses = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], LR), []
    for batch in batches:
        loss = compute_mean_loss(network, batch) if "start_positions" in batch else network(**batch).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: param.detach() for name, param in network.named_parameters()}


def assert_steps_equal_a_bare_loop(record: dict, metrics_csv) -> None:
    (losses, weights), (exact_losses, exact) = in_both(partial(train_bare_loop, record["batches"]),
                                                       record["start"].train())
    with open(metrics_csv, newline="") as file:
        logged = [float(row["train/loss"]) for row in csv.DictReader(file)]
    assert len(logged) == 2
    assert_as_close(logged, losses, exact_losses)
    trained = dict(record["module"].model.named_parameters())
    assert any(param.requires_grad for param in trained.values())
    assert_as_close(trained, weights, exact)


def compute_mean_loss(network: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return transformers' loss of answer spans, row by row, as its softmax would include padding."""
    if hasattr(network, "get_base_model"):
        network = network.get_base_model()  # PEFT's wrapper drops token_type_ids
    losses = []
    for index, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        row = {name: x[index : index + 1] for name, x in batch.items()}
        losses.append(network(**{name: x[:, :length] if x.ndim > 1 else x for name, x in row.items()}).loss)
    return torch.stack(losses).mean()


def make_recipe(recipe, task: str, pretrained: str, lora: bool, data: dict) -> list[str]:
    model = {"pretrained": pretrained, "lora": {"rank": 4} if lora else None, "optimizer": {"name": "sgd", "lr": LR}}
    return recipe(model={"class_path": task, "init_args": model}, trainer__max_steps=2, trainer__limit_val_batches=0,
                  data={"class_path": f"{task}Data", "init_args": {"max_length": 64, "batch_size": 4, **data}})


@pytest.fixture(scope="session")
def decoder(tmp_path_factory, tokenizer_folder):
    root, folders = tmp_path_factory.mktemp("decoders"), {}

    def folder(name: str) -> str:
        if name not in folders:
            folders[name] = make_folder(root, name, DECODERS[name], tokenizer_folder, "AutoModelForCausalLM")
        return folders[name]

    return folder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory, bert_folder):  # noqa: F811
    root, folders = tmp_path_factory.mktemp("encoders"), {}

    def folder(name: str) -> str:
        if name not in folders:
            folders[name] = make_folder(root, name, ENCODERS[name], bert_folder, "AutoModelForMaskedLM")
        return folders[name]

    return folder


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", [pytest.param(
    name, marks=[pytest.mark.slow] if name in ("mixtral", "gpt_oss") else []) for name in DECODERS])
def test_causal_lms_train_as_in_a_bare_loop(name, lora, decoder, recipe, record, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(line[: 20 + 9 * n] for n, line in enumerate(CORPUS)))
    data = {"source": str(tmp_path / "text.txt"), "documents": "paragraph", "join": False}
    assert main(["fit", *make_recipe(recipe, "CLM", decoder(name), lora, data)]) == 0
    assert_steps_equal_a_bare_loop(record, tmp_path / "run" / "metrics.csv")


@pytest.mark.parametrize("name", DECODERS)
def test_leaks_between_packed_documents_are_detected(name, decoder):
    model = transformers.AutoModelForCausalLM.from_pretrained(decoder(name))
    # gpt-oss makes its masks without position_ids (transformers 5.23)
    assert keeps_packed_apart(model) is (name not in ("opt", "gpt_oss"))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ENCODERS)
def test_masked_lms_train_as_in_a_bare_loop(name, lora, encoder, recipe, record, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(CORPUS))
    data = {"source": str(tmp_path / "text.txt"), "documents": "line", "join": False}
    assert main(["fit", *make_recipe(recipe, "MLM", encoder(name), lora, data)]) == 0
    assert_steps_equal_a_bare_loop(record, tmp_path / "run" / "metrics.csv")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ENCODERS)
def test_question_answering_models_train_as_in_a_bare_loop(name, lora, encoder, recipe, record, tmp_path):
    data = {"source": squad(tmp_path), "question_max_length": 16, "stride": 16}
    assert main(["fit", *make_recipe(recipe, "QA", encoder(name), lora, data)]) == 0
    assert all(("token_type_ids" in batch) is (name not in ONE_SEGMENT) for batch in record["batches"])
    assert_steps_equal_a_bare_loop(record, tmp_path / "run" / "metrics.csv")


@pytest.mark.parametrize("task", ["MLM", "QA"])
def test_an_encoder_trains_on_a_4_bit_base(task, encoder, recipe, tmp_path, record):
    (tmp_path / "text.txt").write_text("\n".join(CORPUS))
    data = {"QA": {"source": squad(tmp_path), "question_max_length": 16, "stride": 16},
            "MLM": {"source": str(tmp_path / "text.txt"), "documents": "line"}}[task]
    arguments = make_recipe(recipe, task, encoder("bert"), True, data)
    assert main(["fit", *arguments, "--model.quantize", "nf4"]) == 0
    module_types = {type(module).__name__ for module in record["module"].model.modules()}
    assert "Linear4bit" in module_types
    assert all(torch.isfinite(param).all() for param in record["module"].trainable().values())
