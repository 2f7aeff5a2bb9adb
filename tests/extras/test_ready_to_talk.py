"""Exported chat models: plain transformers renders the prompts and generates the same answers, which stop."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lmmods.cli import main
from lmmods.data.sft import SFTData

ANSWERS = {"What colour is the fox?": "brown", "What does it jump over?": "the lazy dog"}
SYSTEM = "A fox's \"answers\"."
TURNS = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}


@pytest.fixture(scope="session")
def chat_base(shared, tokenizer_folder) -> Path:
    """Return a random Llama with ChatML tokens but without a chat template."""
    def fill(folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        tokenizer.add_special_tokens(TURNS)
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1,
                             eos_token_id=2, initializer_range=0.2)
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2, 5]}')  # as some have

    return shared("chat_base", fill)


@pytest.fixture(scope="session")
def chats(shared) -> Path:
    """Return a file with two conversations, four times each."""
    rows = [{"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in ANSWERS.items()] * 4
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return shared("chats", lambda folder: (folder / "rows.jsonl").write_text(text)) / "rows.jsonl"


def answer_by_card(folder: Path, base: Path, monkeypatch) -> dict[str, list[int]]:
    """Load a model with the code on its card and return the new tokens for each question."""
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    if "PeftModel" in code:  # the card shows only the last part of a local base's path
        (folder / base.name).symlink_to(base)
    scope: dict = {}
    exec(code, scope)  # noqa: S102 - the point of the test
    model, tokenizer = scope["model"], scope["tokenizer"]
    assert scope["tokens"].shape[1] > scope["prompt"]["input_ids"].shape[1]
    answers = {}
    for question in ANSWERS:
        prompt = tokenizer.apply_chat_template([*scope["messages"][:-1], {"role": "user", "content": question}],
                                               add_generation_prompt=True, return_dict=True, return_tensors="pt")
        answers[question] = model.generate(**prompt)[0, prompt["input_ids"].shape[1]:].tolist()
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("lora", [None, {"rank": 8, "alpha": 16}], ids=["full", "lora"])
def test_an_exported_chat_model_answers_as_predict_does_and_stops(engine, lora, finished, chat_base, chats, tmp_path,
                                                                  monkeypatch):
    run = finished("run", engine=engine, trainer__max_steps=40, trainer__val_check_interval=40,
                   trainer__limit_val_batches=0, checkpoint={"every_n_steps": 40},
                   model__init_args={"pretrained": str(chat_base), "lora": lora, "generation": {"max_new_tokens": 40},
                                     "optimizer": {"lr": 0.01}},
                   data__init_args={"source": str(chats), "val_source": str(chats), "template": "chatml",
                                    "system_prompt": SYSTEM, "max_length": 96, "batch_size": 8})
    assert main(["predict", "--config", str(run.config), "--ckpt_path", "last"]) == 0
    predicted = {row["messages"][0]["content"]: row["prediction"]
                 for row in map(json.loads, run.predictions.read_text().splitlines())}
    assert predicted == ANSWERS
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    folders = [run.model]
    if lora:
        folders.append(tmp_path / "merged")
        assert main(["merge", "--run", str(run.root), "--out", str(folders[1])]) == 0
    for folder in folders:
        for question, tokens in answer_by_card(folder, chat_base, monkeypatch).items():
            assert tokens == [*tokenizer(ANSWERS[question], add_special_tokens=False)["input_ids"], end]
        settings = json.loads((folder / "generation_config.json").read_text())
        assert settings == {"bos_token_id": 1, "eos_token_id": [2, end, 5], "max_new_tokens": 40, "pad_token_id": 0}
    data = SFTData(str(chats), tokenizer=str(chat_base), template="chatml", system_prompt=SYSTEM, max_length=96)
    data.setup("fit")
    turns = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in ANSWERS]
    assert data.encode_prompts(list(ANSWERS)) == [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] for messages in turns]
