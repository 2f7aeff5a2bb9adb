"""Two steps of SGD on many architectures, through the whole program, against transformers' own loss in a bare loop."""

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
ONE_SEGMENT = ("roberta", "distilbert", "deberta-v2")  # they take no token_type_ids, or only zeros


def make_folder(root, name: str, fields: dict, tokenizer_folder, auto_class: str) -> str:
    """A random model of this architecture with a tokenizer beside it."""
    folder = root / name
    shutil.copytree(tokenizer_folder, folder)
    if name in ENCODERS:  # or AutoTokenizer takes the class, and the kind of vocabulary, that goes with the model
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
def seen(monkeypatch):
    """The network as it started, the module, and the batches it trained on."""
    found = {"batches": []}
    configure, step = TaskModule.configure_model, TaskModule.training_step

    def configure_model(self):
        configure(self)
        found.setdefault("start", copy.deepcopy(self.model))
        found["module"] = self

    def training_step(self, batches, batch_idx):
        found["batches"] += [{key: value for key, value in batch.items() if key != "index"} for batch in batches]
        return step(self, batches, batch_idx)

    monkeypatch.setattr(TaskModule, "configure_model", configure_model)
    monkeypatch.setattr(TaskModule, "training_step", training_step)
    return found


def bare_loop(batches: list[dict[str, torch.Tensor]], network: torch.nn.Module) -> tuple[list, dict]:
    """Losses of the batches, and the parameters behind them."""
    optimizer, losses = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], LR), []
    for batch in batches:
        loss = mean_of_rows(network, batch) if "start_positions" in batch else network(**batch).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: param.detach() for name, param in network.named_parameters()}


def assert_two_steps_equal_those_of_a_bare_loop(seen: dict, metrics_csv) -> None:
    (losses, weights), (exact_losses, exact) = in_both(partial(bare_loop, seen["batches"]), seen["start"].train())
    with open(metrics_csv, newline="") as file:
        told = [float(row["train/loss"]) for row in csv.DictReader(file)]
    assert len(told) == 2
    assert_as_close(told, losses, exact_losses)
    trained = dict(seen["module"].model.named_parameters())
    assert any(param.requires_grad for param in trained.values())
    assert_as_close(trained, weights, exact)


def mean_of_rows(network: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """transformers' loss of answer spans, row by row without padding, which its softmax would see."""
    if hasattr(network, "get_base_model"):
        network = network.get_base_model()  # PEFT's wrapper drops token_type_ids
    losses = []
    for number, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        row = {name: x[number : number + 1] for name, x in batch.items()}
        losses.append(network(**{name: x[:, :length] if x.ndim > 1 else x for name, x in row.items()}).loss)
    return torch.stack(losses).mean()


def two_steps(recipe, task: str, pretrained: str, lora: bool, data: dict) -> list[str]:
    model = {"pretrained": pretrained, "lora": {"rank": 4} if lora else None, "optimizer": {"name": "sgd", "lr": LR}}
    return recipe(model={"class_path": task, "init_args": model}, trainer__max_steps=2, trainer__limit_val_batches=0,
                  data={"class_path": f"{task}Data", "init_args": {"max_length": 64, "batch_size": 4, **data}})


@pytest.fixture(scope="session")
def decoder(tmp_path_factory, tokenizer_folder):
    root, made = tmp_path_factory.mktemp("decoders"), {}

    def folder(name: str) -> str:
        if name not in made:
            made[name] = make_folder(root, name, DECODERS[name], tokenizer_folder, "AutoModelForCausalLM")
        return made[name]

    return folder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory, bert_folder):  # noqa: F811
    root, made = tmp_path_factory.mktemp("encoders"), {}

    def folder(name: str) -> str:
        if name not in made:
            made[name] = make_folder(root, name, ENCODERS[name], bert_folder, "AutoModelForMaskedLM")
        return made[name]

    return folder


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", [pytest.param(
    name, marks=[pytest.mark.slow] if name in ("mixtral", "gpt_oss") else []) for name in DECODERS])
def test_causal_lm(name, lora, decoder, recipe, seen, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(line[: 20 + 9 * n] for n, line in enumerate(CORPUS)))
    data = {"source": str(tmp_path / "text.txt"), "documents": "paragraph", "join": False}
    assert main(["fit", *two_steps(recipe, "CLM", decoder(name), lora, data)]) == 0
    assert_two_steps_equal_those_of_a_bare_loop(seen, tmp_path / "run" / "metrics.csv")


@pytest.mark.parametrize("name", DECODERS)
def test_packed_documents_are_kept_apart_or_found_leaking(name, decoder):
    model = transformers.AutoModelForCausalLM.from_pretrained(decoder(name))
    # gpt-oss makes its masks without position_ids (transformers 5.23)
    assert keeps_packed_apart(model) is (name not in ("opt", "gpt_oss"))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ENCODERS)
def test_masked_lm(name, lora, encoder, recipe, seen, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(CORPUS))
    data = {"source": str(tmp_path / "text.txt"), "documents": "line", "join": False}
    assert main(["fit", *two_steps(recipe, "MLM", encoder(name), lora, data)]) == 0
    assert_two_steps_equal_those_of_a_bare_loop(seen, tmp_path / "run" / "metrics.csv")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ENCODERS)
def test_question_answering(name, lora, encoder, recipe, seen, tmp_path):
    data = {"source": squad(tmp_path), "question_max_length": 16, "stride": 16}
    assert main(["fit", *two_steps(recipe, "QA", encoder(name), lora, data)]) == 0
    assert all(("token_type_ids" in batch) is (name not in ONE_SEGMENT) for batch in seen["batches"])
    assert_two_steps_equal_those_of_a_bare_loop(seen, tmp_path / "run" / "metrics.csv")


@pytest.mark.parametrize("task", ["MLM", "QA"])
def test_an_encoder_on_a_4_bit_base(task, encoder, recipe, tmp_path, seen):
    (tmp_path / "text.txt").write_text("\n".join(CORPUS))
    data = {"QA": {"source": squad(tmp_path), "question_max_length": 16, "stride": 16},
            "MLM": {"source": str(tmp_path / "text.txt"), "documents": "line"}}[task]
    arguments = two_steps(recipe, task, encoder("bert"), True, data)
    assert main(["fit", *arguments, "--model.quantize", "nf4"]) == 0
    kinds = {type(module).__name__ for module in seen["module"].model.modules()}
    assert "Linear4bit" in kinds
    assert all(torch.isfinite(param).all() for param in seen["module"].trainable().values())
