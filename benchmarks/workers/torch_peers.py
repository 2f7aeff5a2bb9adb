"""What people use on torch: transformers' Trainer, TRL's SFTTrainer, a loop like qlora.py's, and a bare loop."""

import torch
from rounds import Rounds, read_check, read_rows, settings
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    DefaultDataCollator,
    Trainer,
    TrainingArguments,
)

MODELS = {"sft": AutoModelForCausalLM, "clm": AutoModelForCausalLM, "mlm": AutoModelForMaskedLM,
          "qa": AutoModelForQuestionAnswering, "preference": AutoModelForCausalLM}


def load_model(asked: dict) -> torch.nn.Module:
    dtype = torch.bfloat16 if asked["bf16"] else torch.float32
    quantised = {"quantization_config": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype),
        "device_map": {"": "cpu"}} if asked["method"] == "qlora" else {}
    return MODELS[asked["task"]].from_pretrained(f"{asked['folder']}/model", dtype=torch.float32, **quantised)


def lora(asked: dict):  # noqa: ANN201
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def note_start(rounds: Rounds, model: torch.nn.Module, asked: dict) -> None:
    """Loss of the check batch by the model's own loss, in training mode (dropout is 0)."""
    batch = {name: torch.tensor(value) for name, value in read_check(asked["folder"]).items() if name != "index"}
    if asked["task"] == "preference":  # whose loss is log 2 wherever a run begins: how unlikely the better answers are
        batch = {name: batch[name][:, 0] for name in ("input_ids", "attention_mask", "labels")}
        answers_per_token = len(batch["labels"]) / (batch["labels"][:, 1:] >= 0).sum()
    with torch.autocast("cpu", torch.bfloat16, enabled=asked["bf16"]):
        loss = model.train()(**batch).loss
        rounds.start_loss(float(loss / answers_per_token if asked["task"] == "preference" else loss))


def counting(trainer_class: type) -> type:
    """A trainer that counts the real tokens of a step, and logs nothing."""
    class Counting(trainer_class):
        def training_step(self, model, inputs, *args):  # noqa: ANN001, ANN002, ANN202
            self.tokens = int(inputs["attention_mask"].sum())
            return super().training_step(model, inputs, *args)

        def log(self, *args, **kwargs):  # noqa: ANN002, ANN003, ANN202
            pass

    return Counting


def callback(rounds: Rounds, holder: dict):  # noqa: ANN201
    from transformers import TrainerCallback

    class Pacer(TrainerCallback):
        def on_step_end(self, *args, **kwargs):  # noqa: ANN002, ANN003, ANN202
            rounds.step(holder["trainer"].tokens)

    return Pacer()


def arguments(asked: dict) -> dict:
    """The scripts' own settings; only what would write files, or stop the run, is changed."""
    return {"output_dir": f"{asked['folder']}/peer", "per_device_train_batch_size": asked["batch_size"],
            "learning_rate": 1e-4, "max_steps": 100_000, "report_to": [], "save_strategy": "no", "use_cpu": True,
            "bf16": asked["bf16"], "disable_tqdm": True}


def trainer_run(asked: dict, rounds: Rounds) -> None:
    """run_clm, run_mlm and run_qa: fixed blocks, random masks, windows padded to their full length."""
    tokenizer = AutoTokenizer.from_pretrained(f"{asked['folder']}/model")
    rows, task = read_rows(asked["folder"]), asked["task"]
    if task == "mlm":
        collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
        rows = [{"input_ids": row["input_ids"], "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    else:
        collate = DefaultDataCollator()
        rows = [padded(row, asked["length"], tokenizer.pad_token_id) if task == "qa" else
                {"input_ids": row["input_ids"], "attention_mask": [1] * len(row["input_ids"]),
                 "labels": row["input_ids"]} for row in rows]
    model, holder = load_model(asked), {}
    note_start(rounds, model, asked)
    holder["trainer"] = counting(Trainer)(
        model=model, args=TrainingArguments(**arguments(asked)), train_dataset=rows, data_collator=collate,
        callbacks=[callback(rounds, holder)])
    holder["trainer"].train()


def padded(row: dict, length: int, pad_id: int) -> dict:
    """A window filled up to the full length, as run_qa's pad_to_max_length does."""
    missing = length - len(row["input_ids"])
    return {"input_ids": row["input_ids"] + [pad_id] * missing,
            "attention_mask": [1] * len(row["input_ids"]) + [0] * missing,
            "token_type_ids": row["token_type_ids"] + [0] * missing,
            "start_positions": row["start_positions"], "end_positions": row["end_positions"]}


def trl_run(asked: dict, rounds: Rounds) -> None:
    """SFTTrainer at its defaults: padded to the longest, gradient checkpointing, full logits, entropy each step."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    holder: dict = {}
    data = Dataset.from_list([{"input_ids": row["input_ids"], "labels": row["labels"]}
                              for row in read_rows(asked["folder"])])
    trainer = counting(SFTTrainer)(
        model=load_model(asked), args=SFTConfig(**arguments(asked)), train_dataset=data, peft_config=lora(asked),
        processing_class=AutoTokenizer.from_pretrained(f"{asked['folder']}/model"),
        callbacks=[callback(rounds, holder)])
    holder["trainer"] = trainer
    note_start(rounds, trainer.model, asked)
    trainer.train()


def dpo_run(asked: dict, rounds: Rounds) -> None:
    """TRL's DPOTrainer on rows that are tokens already; its reference is the base with the adapter off, as ours."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Tokenised(counting(DPOTrainer)):
        def _prepare_dataset(self, dataset, *args, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN202
            return dataset

    holder: dict = {}
    holder["trainer"] = trainer = Tokenised(
        model=load_model(asked), args=DPOConfig(**arguments(asked)), train_dataset=Dataset.from_list(
            read_rows(asked["folder"])), peft_config=lora(asked),
        processing_class=AutoTokenizer.from_pretrained(f"{asked['folder']}/model"),
        callbacks=[callback(rounds, holder)])
    note_start(rounds, trainer.model, asked)
    trainer.train()


def batches(asked: dict):  # noqa: ANN201
    """Random batches without end, padded to the longest row."""
    rows = read_rows(asked["folder"])
    tokenizer = AutoTokenizer.from_pretrained(f"{asked['folder']}/model")
    fill = {"input_ids": tokenizer.pad_token_id, "labels": -100}
    while True:
        order = torch.randperm(len(rows)).tolist()
        for start in range(0, len(order) - asked["batch_size"] + 1, asked["batch_size"]):
            chosen = [rows[i] for i in order[start : start + asked["batch_size"]]]
            batch = {name: pad_sequence([torch.tensor(row[name]) for row in chosen], True, value)
                     for name, value in fill.items()}
            lengths = torch.tensor([len(row["input_ids"]) for row in chosen])
            mask = torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]
            yield {**batch, "attention_mask": mask.long()}


def loop_run(asked: dict, rounds: Rounds) -> None:
    """A loop without a trainer: for QLoRA as qlora.py has it (it checkpoints gradients unless told not to), otherwise
    the barest there is.
    """
    model = load_model(asked)
    if asked["method"] != "full":
        from peft import get_peft_model, prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
        model = get_peft_model(model, lora(asked))
    note_start(rounds, model, asked)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    for batch in batches(asked):
        with torch.autocast("cpu", torch.bfloat16, enabled=asked["bf16"]):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rounds.step(int(batch["attention_mask"].sum()))


if __name__ == "__main__":
    asked = settings()
    runs = {"trainer": trainer_run, "trl": dpo_run if asked["task"] == "preference" else trl_run, "loop": loop_run}
    runs[asked["peer"]](asked, Rounds(asked["warm_up"], asked["steps"]))
