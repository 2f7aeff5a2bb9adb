"""A tokenizer without a padding token gets no new embedding row, so that probabilities do not change."""

import csv
import json

import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from lmmods.cli import main
from lmmods.data.base import DataModule
from lmmods.data.clm import CLMData
from lmmods.runs.folder import RunFolder
from tests.conftest import TEXTS
from tests.finished_runs import assert_same_checkpoint

ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])
SLOW_ON_JAX = pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
END = "<|endoftext|>"


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    """Return a random GPT-2 without dropout; its only special token is BOS, EOS and UNK."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXTS * 5, trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, unk_token=END)
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=64,
                               resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.3, bos_token_id=0,
                               eos_token_id=0)).save_pretrained(folder)
    return folder


@pytest.fixture
def data_of(gpt2_folder, tmp_path):
    """Return fields of CLMData with lines of unequal length, one row each."""
    (tmp_path / "text.txt").write_text("".join(f"{'the quick brown fox ' * (n % 4)}{n}\n" for n in range(24)))
    return {"source": str(tmp_path / "text.txt"), "documents": "line", "join": False, "max_length": 64, "batch_size": 6}


@pytest.fixture
def clm(recipe, gpt2_folder, data_of):
    def write(engine, **changes):
        return recipe(engine=engine, model={"class_path": "CLM", "init_args": {
            "pretrained": str(gpt2_folder), "optimizer": {"lr": 0.01}, "generation": {"max_new_tokens": 8}}},
            data={"class_path": "CLMData", "init_args": data_of},
            **{"trainer__max_steps": 4, "trainer__limit_val_batches": 0, **changes})

    return write


def read_losses(run: RunFolder) -> list[float]:
    with open(run.metrics_csv, newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file)]


@SLOW_ON_JAX
def test_the_first_loss_equals_that_of_transformers(clm, gpt2_folder, data_of, tmp_path, engine):
    assert main(["fit", *clm(engine)]) == 0
    data = CLMData(**data_of, tokenizer=str(gpt2_folder), seed=7)
    data.setup("fit")
    batch = next(iter(data.train_batches()))
    assert (batch["attention_mask"] == 0).any() and (batch["labels"] == data.tokenizer.eos_token_id).sum() == 6
    model = GPT2LMHeadModel.from_pretrained(gpt2_folder).eval()
    with torch.no_grad():
        expected = model(**batch).loss.item()
    run = RunFolder(tmp_path / "run")
    assert main(["validate", "--config", str(run.config), "--ckpt_path", "last", "--data.val_source",
                 data_of["source"], "--trainer.limit_val_batches", "1.0"]) == 0
    assert read_losses(run)[0] == pytest.approx(expected, abs=2e-6)
    exported = AutoModelForCausalLM.from_pretrained(run.model)
    assert exported.get_input_embeddings().weight.shape == model.get_input_embeddings().weight.shape
    # The config has no padding token, whose embedding torch would not train; the tokenizer still pads.
    assert exported.generation_config.pad_token_id == 0
    assert exported.config.pad_token_id is None and AutoTokenizer.from_pretrained(run.model).pad_token == END


@ENGINES
def test_answers_do_not_depend_on_the_batch(clm, tmp_path, engine):
    (tmp_path / "ask.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in
                                                ("the", "the quick brown fox jumps over", "1 and 2")))
    predictions = []
    for size in (1, 3):
        changes = {"data__init_args__predict_source": str(tmp_path / "ask.jsonl"),
                   "data__init_args__eval_batch_size": size, "data__init_args__documents": "line"}
        assert main(["predict", *clm(engine, **changes)]) == 0
        predictions.append([json.loads(line)["prediction"] for line in RunFolder(tmp_path / "run").predictions.open()])
    assert predictions[0] == predictions[1] and any(predictions[0])


@pytest.mark.slow
@SLOW_ON_JAX
@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
def test_an_old_run_with_an_added_padding_row_keeps_it(clm, tmp_path, monkeypatch, stop_at, engine, lora):
    """Resume older checkpoints, which do not record padding, twice; they end with the same bits."""
    old, resumed = RunFolder(tmp_path / "old"), RunFolder(tmp_path / "resumed")

    def arguments(run, steps):
        return clm(engine, trainer__default_root_dir=str(run.root), trainer__max_steps=steps,
                   model__init_args__lora=lora, checkpoint={"every_n_steps": 1})

    with monkeypatch.context() as patch:
        patch.setattr(CLMData, "adds_padding", True)
        patch.setattr(DataModule, "state_at", lambda self, position: position)
        assert main(["fit", *arguments(old, 4)]) == 0
        assert main(["fit", *arguments(resumed, 2)]) == 0
    for steps in (3, 4):
        assert main(["fit", *arguments(resumed, steps), "--ckpt_path", "last"]) == 0
    assert_same_checkpoint(resumed, old)
    assert read_losses(resumed) == read_losses(old)
    if not lora:
        rows = {len(load_file(run.resolve("last") / "model.safetensors")["model.transformer.wte.weight"])
                for run in (old, resumed)}
        assert rows == {len(AutoTokenizer.from_pretrained(run.model)) for run in (old, resumed)} and len(rows) == 1
    else:
        assert main(["merge", "--run", str(resumed.root), "--out", str(tmp_path / "merged")]) == 0
