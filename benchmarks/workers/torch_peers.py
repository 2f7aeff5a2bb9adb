"""What people use on torch: transformers' Trainer, TRL's SFTTrainer, a loop like qlora.py's, and a bare loop.

Each runs at its defaults, or as somebody who knows it would set it for a CPU: the driver then sends `tuned`, arguments
for the trainer's configuration, or for the loop `group_by_length` and `gradient_checkpointing`.
"""

import time

import torch
from rounds import Rounds, read_check, read_rows, settings
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    DefaultDataCollator,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_pt_utils import get_length_grouped_indices

MODELS = {"sft": AutoModelForCausalLM, "clm": AutoModelForCausalLM, "mlm": AutoModelForMaskedLM,
          "qa": AutoModelForQuestionAnswering, "preference": AutoModelForCausalLM, "grpo": AutoModelForCausalLM,
          "sequence_classification": AutoModelForSequenceClassification,
          "token_classification": AutoModelForTokenClassification}
# As run_glue and run_ner set them where rows are padded to the longest of their batch.
LABEL_COLLATORS = {"sequence_classification": DataCollatorWithPadding,
                   "token_classification": DataCollatorForTokenClassification}


def load_model(asked: dict) -> torch.nn.Module:
    """The model on the CPU; for QLoRA in nf4 with double quantisation.

    Under bfloat16 a tuned peer also keeps what is not quantised in it, and the residual stream with that.
    """
    dtype = torch.bfloat16 if asked["bf16"] else torch.float32
    stored = dtype if asked["tuned"] else torch.float32
    quantised = {"quantization_config": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype),
        "device_map": {"": "cpu"}} if asked["method"] == "qlora" else {}
    return MODELS[asked["task"]].from_pretrained(f"{asked['folder']}/model", dtype=stored, **quantised)


def lora(asked: dict):  # noqa: ANN201
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def note_start(rounds: Rounds, model: torch.nn.Module, asked: dict) -> None:
    """Loss of the check batch by the model's own loss, in training mode (dropout is 0)."""
    rounds.ready()
    batch = {name: torch.tensor(value) for name, value in read_check(asked["folder"]).items() if name != "index"}
    if asked["task"] == "preference":  # whose loss is log 2 wherever a run begins: how unlikely the better answers are
        batch = {name: batch[name][:, 0] for name in ("input_ids", "attention_mask", "labels")}
        answers_per_token = len(batch["labels"]) / (batch["labels"][:, 1:] >= 0).sum()
    with torch.autocast("cpu", torch.bfloat16, enabled=asked["bf16"]):
        loss = model.train()(**batch).loss
        rounds.start_loss(float(loss / answers_per_token if asked["task"] == "preference" else loss))


class ShuffledBatches(Sampler):
    """A sampler's batches in random order, but for the first: a few steps then stand for an epoch.

    Trainer takes grouped rows from the longest to the shortest, 50 batches at a time. The first batch has the longest
    row of all, which memory must hold.
    """

    def __init__(self, rows: Sampler, batch_size: int):
        self.rows, self.batch_size = rows, batch_size

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self):  # noqa: ANN204
        return iter(shuffle_batches(list(self.rows), self.batch_size))


def shuffle_batches(order: list[int], batch_size: int) -> list[int]:
    """Numbers of rows with their whole batches in random order between the first batch and an incomplete last one."""
    first, *batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    last = [batches.pop()] if batches and len(batches[-1]) < batch_size else []
    shuffled = [batches[place] for place in torch.randperm(len(batches)).tolist()]
    return [number for batch in (first, *shuffled, *last) for number in batch]


def counting(trainer_class: type) -> type:
    """A trainer that counts the real tokens of a step, shuffles grouped batches, and logs nothing."""
    class Counting(trainer_class):
        def _get_train_sampler(self, *args):  # noqa: ANN002, ANN202
            rows = super()._get_train_sampler(*args)
            grouped = self.args.train_sampling_strategy == "group_by_length"
            return ShuffledBatches(rows, self.args.train_batch_size) if grouped else rows

        def training_step(self, model, inputs, *args):  # noqa: ANN001, ANN002, ANN202
            packed = "attention_mask" not in inputs  # then nothing is padded
            self.tokens = inputs["input_ids"].numel() if packed else int(inputs["attention_mask"].sum())
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
    """The scripts' own settings and those of `tuned`; only what would write files, or stop the run, is changed."""
    return {"output_dir": f"{asked['folder']}/peer", "per_device_train_batch_size": asked["batch_size"],
            "per_device_eval_batch_size": asked["batch_size"], "learning_rate": 1e-4, "max_steps": 100_000,
            "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": asked["bf16"], "disable_tqdm": True,
            **asked["tuned"]}


def trainer_run(asked: dict, rounds: Rounds) -> None:
    """run_clm, run_mlm, run_qa, run_glue and run_ner: fixed blocks, random masks, windows padded to their full length,
    labelled texts padded to the longest of their batch; where rows are grouped by length, windows are, too.
    """
    tokenizer = AutoTokenizer.from_pretrained(f"{asked['folder']}/model")
    rows, task = read_rows(asked["folder"]), asked["task"]
    if task == "qa" and "train_sampling_strategy" in asked["tuned"]:
        collate = DataCollatorWithPadding(tokenizer)
    elif task in LABEL_COLLATORS:
        collate = LABEL_COLLATORS[task](tokenizer)
        rows = [{name: row[name] for name in ("input_ids", "attention_mask", "token_type_ids", "labels")
                 if name in row} for row in rows]
    elif task == "mlm":
        collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
        rows = [{"input_ids": row["input_ids"], "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    else:
        collate = DefaultDataCollator()
        rows = [padded(row, asked["length"], tokenizer.pad_token_id) if task == "qa" else
                {"input_ids": row["input_ids"], "attention_mask": [1] * len(row["input_ids"]),
                 "labels": row["input_ids"]} for row in rows]
    model, holder = load_model(asked), {}
    note_start(rounds, model, asked)
    if asked.get("command") == "validate":
        evaluate_run(asked, rounds, model, rows, collate)
    holder["trainer"] = counting(Trainer)(
        model=model, args=TrainingArguments(**arguments(asked)), train_dataset=rows, data_collator=collate,
        callbacks=[callback(rounds, holder)])
    holder["trainer"].train()


def evaluate_run(asked: dict, rounds: Rounds, model: torch.nn.Module, rows: list[dict], collate) -> None:  # noqa: ANN001
    """Trainer.evaluate again and again, until the driver has enough rounds: the loss, and the accuracy of labelled
    texts, as in run_glue. run_clm's accuracy needs the logits of every token, so it is left out.
    """
    labels = asked["task"] == "sequence_classification"
    trainer = Trainer(model=model, args=TrainingArguments(**arguments(asked)), eval_dataset=rows, data_collator=collate,
                      compute_metrics=accuracy if labels else None)
    tokens = sum(len(row["input_ids"]) for row in rows)
    rounds.ready()
    while True:
        rounds.start_loss(trainer.evaluate()["eval_loss"])
        rounds.step(tokens)


def accuracy(found) -> dict[str, float]:  # noqa: ANN001
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def padded(row: dict, length: int, pad_id: int) -> dict:
    """A window filled up to the full length, as run_qa's pad_to_max_length does."""
    missing = length - len(row["input_ids"])
    return {"input_ids": row["input_ids"] + [pad_id] * missing,
            "attention_mask": [1] * len(row["input_ids"]) + [0] * missing,
            "token_type_ids": row["token_type_ids"] + [0] * missing,
            "start_positions": row["start_positions"], "end_positions": row["end_positions"]}


def trl_run(asked: dict, rounds: Rounds) -> None:
    """SFTTrainer, at its defaults padded to the longest with gradient checkpointing; on a CPU it scores all positions,
    in chunks, and takes their entropy.
    """
    tokenizer = AutoTokenizer.from_pretrained(f"{asked['folder']}/model")
    sft_run(asked, rounds, load_model(asked), tokenizer, peft_config=lora(asked))


def sft_run(asked: dict, rounds: Rounds, model: torch.nn.Module, tokenizer, **adapter) -> None:  # noqa: ANN001, ANN003
    """SFTTrainer with a model; `adapter` where it has none yet."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    holder: dict = {}
    data = Dataset.from_list([{"input_ids": row["input_ids"], "labels": row["labels"]}
                              for row in read_rows(asked["folder"])])
    holder["trainer"] = trainer = counting(SFTTrainer)(
        model=model, args=SFTConfig(**arguments(asked)), train_dataset=data, processing_class=tokenizer,
        callbacks=[callback(rounds, holder)], **adapter)
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
        model=load_model(asked), peft_config=lora(asked),
        args=DPOConfig(**arguments(asked), remove_unused_columns=False),  # `length` is one of those
        train_dataset=Dataset.from_list(
            [{**row, "length": pair_length(row)} for row in read_rows(asked["folder"])]),
        processing_class=AutoTokenizer.from_pretrained(f"{asked['folder']}/model"),
        callbacks=[callback(rounds, holder)])
    note_start(rounds, trainer.model, asked)
    trainer.train()


def grpo_run(asked: dict, rounds: Rounds) -> None:
    """TRL's GRPOTrainer on prompts that are tokens already; a step is a rollout."""
    from datasets import Dataset
    from rewarding import vowels
    from trl import GRPOConfig, GRPOTrainer

    def clocked(method, part: str):  # noqa: ANN001, ANN202
        def call(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
            began = time.perf_counter()
            found = method(*args, **kwargs)
            rounds.spend(part, time.perf_counter() - began)
            return found

        return call

    rows = read_rows(asked["folder"])
    ids = {row["prompt"]: row["prompt_ids"] for row in rows}

    class Clocked(counting(GRPOTrainer)):
        def _tokenize_prompts(self, prompts):  # noqa: ANN001, ANN202
            return [ids[prompt] for prompt in prompts], None, {}

        def training_step(self, model, inputs, *args):  # noqa: ANN001, ANN002, ANN202
            return GRPOTrainer.training_step(self, model, inputs, *args)

        def _prepare_inputs(self, *args):  # noqa: ANN002, ANN202
            found = super()._prepare_inputs(*args)
            self.tokens = int(found["completion_mask"].sum())
            return found

        _generate = clocked(GRPOTrainer._generate, "drawing")
        _calculate_rewards = clocked(GRPOTrainer._calculate_rewards, "rewards")

    holder: dict = {}
    adapter = {"peft_config": lora(asked)} if asked["method"] != "full" else {}
    holder["trainer"] = trainer = Clocked(
        model=load_model(asked), reward_funcs=vowels, **adapter,
        args=GRPOConfig(**arguments(asked), num_generations=asked["num_answers"],
                        max_completion_length=asked["answer_length"]),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(f"{asked['folder']}/model"),
        callbacks=[callback(rounds, holder)])
    note_start(rounds, trainer.model, asked)
    trainer.train()


def pair_length(row: dict) -> int:
    """By which pairs are grouped: tokens of the prompt with the longer answer."""
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def batches(asked: dict):  # noqa: ANN201
    """Random batches without end, padded to the longest row; tuned, of rows of similar length, as Trainer groups them.
    """
    rows = read_rows(asked["folder"])
    tokenizer = AutoTokenizer.from_pretrained(f"{asked['folder']}/model")
    fill = {"input_ids": tokenizer.pad_token_id, "labels": -100}
    lengths = [len(row["input_ids"]) for row in rows]
    grouped = asked["tuned"].get("group_by_length")
    while True:
        size = asked["batch_size"]
        order = (shuffle_batches(get_length_grouped_indices(lengths, size), size) if grouped else
                 torch.randperm(len(rows)).tolist())
        for start in range(0, len(order) - asked["batch_size"] + 1, asked["batch_size"]):
            chosen = [rows[i] for i in order[start : start + asked["batch_size"]]]
            batch = {name: pad_sequence([torch.tensor(row[name]) for row in chosen], True, value)
                     for name, value in fill.items()}
            filled = torch.tensor([len(row["input_ids"]) for row in chosen])
            mask = torch.arange(batch["input_ids"].shape[1]) < filled[:, None]
            yield {**batch, "attention_mask": mask.long()}


def loop_run(asked: dict, rounds: Rounds) -> None:
    """A loop without a trainer: for QLoRA as qlora.py has it (it checkpoints gradients unless told not to), otherwise
    the barest there is.
    """
    model = load_model(asked)
    if asked["method"] != "full":
        from peft import get_peft_model, prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=asked["tuned"].get("gradient_checkpointing", True),
            gradient_checkpointing_kwargs={"use_reentrant": False})
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
    trl = {"preference": dpo_run, "grpo": grpo_run}.get(asked["task"], trl_run)
    runs = {"trainer": trainer_run, "trl": trl, "loop": loop_run}
    runs[asked["peer"]](asked, Rounds(asked))
