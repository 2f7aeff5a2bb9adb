"""Peers on torch: transformers' Trainer, TRL's trainers, a loop like qlora.py's, and a bare loop.

Each runs with its defaults, or tuned for a device: then the driver sends `tuned`, arguments for the trainer's
configuration, or `group_by_length` and `gradient_checkpointing` for the loop. The device is the GPU if the driver sends
`device: cuda`.
"""

import time

import torch
from rounds import Rounds, read_check, read_rows, read_settings
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
# As in run_glue and run_ner, which pad rows to the longest of their batch.
LABEL_COLLATORS = {"sequence_classification": DataCollatorWithPadding,
                   "token_classification": DataCollatorForTokenClassification}


def load_model(settings: dict) -> torch.nn.Module:
    """Load the model on the device; for QLoRA in nf4 with double quantisation.

    With bfloat16, a tuned peer also stores the weights that are not quantised in it, and so the residual stream.
    """
    dtype = torch.bfloat16 if settings["bf16"] else torch.float32
    stored = dtype if settings["tuned"] else torch.float32
    device = settings.get("device", "cpu")
    options = {"device_map": {"": device}} if settings["method"] == "qlora" or device != "cpu" else {}
    if settings["method"] == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    return MODELS[settings["task"]].from_pretrained(f"{settings['folder']}/model", dtype=stored, **options)


def make_lora(settings: dict):  # noqa: ANN201
    """Return the adapter's configuration; None for full fine-tuning."""
    from peft import LoraConfig

    rank = settings.get("rank", 16)
    return None if settings["method"] == "full" else LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def make_rounds(settings: dict) -> Rounds:
    """Return the counter, with the GPU's peak memory if there is a GPU."""
    is_gpu = settings.get("device") == "cuda"
    return Rounds(settings, peak=(lambda: torch.cuda.max_memory_allocated() / 2**30) if is_gpu else None)


def record_start(rounds: Rounds, model: torch.nn.Module, settings: dict) -> None:
    """Record the model's own loss of the check batch, in training mode (dropout is 0)."""
    rounds.record_ready()
    device = settings.get("device", "cpu")
    batch = {name: torch.tensor(value, device=device) for name, value in read_check(settings["folder"]).items()
             if name != "index"}
    if settings["task"] == "preference":  # the loss is log 2 at any start; use the chosen answers' loss
        batch = {name: batch[name][:, 0] for name in ("input_ids", "attention_mask", "labels")}
        answers_per_token = len(batch["labels"]) / (batch["labels"][:, 1:] >= 0).sum()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=settings["bf16"]):
        loss = model.train()(**batch).loss
        rounds.record_loss(float(loss / answers_per_token if settings["task"] == "preference" else loss))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


class ShuffledBatches(Sampler):
    """Sampler of another sampler's batches in random order except the first, so that a few steps represent an epoch.

    Trainer sorts grouped rows from longest to shortest, 50 batches at a time. The first batch contains the longest row
    of all, which determines the peak memory.
    """

    def __init__(self, rows: Sampler, batch_size: int):
        self.rows, self.batch_size = rows, batch_size

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self):  # noqa: ANN204
        return iter(shuffle_batches(list(self.rows), self.batch_size))


def shuffle_batches(order: list[int], batch_size: int) -> list[int]:
    """Return row indices with the full batches in random order; the first batch and an incomplete last one stay."""
    first, *batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    last = [batches.pop()] if batches and len(batches[-1]) < batch_size else []
    shuffled = [batches[index] for index in torch.randperm(len(batches)).tolist()]
    return [row_index for batch in (first, *shuffled, *last) for row_index in batch]


def make_counting_class(trainer_class: type) -> type:
    """Return a trainer class that counts the real tokens of a step, shuffles grouped batches, and logs nothing."""
    class CountingTrainer(trainer_class):
        tokens = 0

        def _get_train_sampler(self, *args):  # noqa: ANN002, ANN202
            rows = super()._get_train_sampler(*args)
            is_grouped = self.args.train_sampling_strategy == "group_by_length"
            return ShuffledBatches(rows, self.args.train_batch_size) if is_grouped else rows

        def training_step(self, model, inputs, *args):  # noqa: ANN001, ANN002, ANN202
            is_packed = "attention_mask" not in inputs  # packed rows have no padding
            self.tokens += inputs["input_ids"].numel() if is_packed else inputs["attention_mask"].sum()
            return super().training_step(model, inputs, *args)

        def log(self, *args, **kwargs):  # noqa: ANN002, ANN003, ANN202
            pass

    return CountingTrainer


def make_callback(rounds: Rounds, holder: dict):  # noqa: ANN201
    from transformers import TrainerCallback

    class Pacer(TrainerCallback):
        def on_step_end(self, *args, **kwargs):  # noqa: ANN002, ANN003, ANN202
            if rounds.is_last_step and torch.cuda.is_available():
                torch.cuda.synchronize()
            rounds.record_step(holder["trainer"].tokens)
            holder["trainer"].tokens = 0

    return Pacer()


def trainer_arguments(settings: dict) -> dict:
    """Return the scripts' settings and those of `tuned`, changed only so that they write no files and do not stop."""
    return {"output_dir": f"{settings['folder']}/peer", "per_device_train_batch_size": settings["batch_size"],
            "per_device_eval_batch_size": settings["batch_size"], "learning_rate": 1e-4, "max_steps": 100_000,
            "report_to": [], "save_strategy": "no", "use_cpu": settings.get("device", "cpu") == "cpu",
            "bf16": settings["bf16"], "disable_tqdm": True, **settings["tuned"]}


def run_trainer(settings: dict, rounds: Rounds) -> None:
    """Train like run_clm, run_mlm, run_qa, run_glue and run_ner.

    Language models have fixed blocks, with random masks for MLM. Labelled texts are padded to the longest of their
    batch, windows of QA to their full length, unless rows are grouped by length.
    """
    tokenizer = AutoTokenizer.from_pretrained(f"{settings['folder']}/model")
    rows, task = read_rows(settings["folder"]), settings["task"]
    if task == "qa" and "train_sampling_strategy" in settings["tuned"]:
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
        rows = [pad_window(row, settings["length"], tokenizer.pad_token_id) if task == "qa" else
                {"input_ids": row["input_ids"], "attention_mask": [1] * len(row["input_ids"]),
                 "labels": row["input_ids"]} for row in rows]
    model, holder = load_model(settings), {}
    record_start(rounds, model, settings)
    if settings.get("command") == "validate":
        run_evaluation(settings, rounds, model, rows, collate)
    holder["trainer"] = make_counting_class(Trainer)(
        model=model, args=TrainingArguments(**trainer_arguments(settings)), train_dataset=rows, data_collator=collate,
        callbacks=[make_callback(rounds, holder)])
    holder["trainer"].train()


def run_evaluation(settings: dict, rounds: Rounds, model: torch.nn.Module, rows: list[dict], collate) -> None:  # noqa: ANN001
    """Repeat Trainer.evaluate until the driver has enough rounds.

    Computes the loss, and the accuracy of labelled texts, as in run_glue. run_clm's accuracy is omitted, as it needs
    the logits of every token.
    """
    has_labels = settings["task"] == "sequence_classification"
    trainer = Trainer(model=model, args=TrainingArguments(**trainer_arguments(settings)), eval_dataset=rows,
                      data_collator=collate, compute_metrics=accuracy if has_labels else None)
    tokens = sum(len(row["input_ids"]) for row in rows)
    rounds.record_ready()
    while True:
        rounds.record_loss(trainer.evaluate()["eval_loss"])
        rounds.record_step(tokens)


def accuracy(prediction) -> dict[str, float]:  # noqa: ANN001
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def pad_window(row: dict, length: int, pad_id: int) -> dict:
    """Pad a window to the full length, like run_qa's pad_to_max_length."""
    missing = length - len(row["input_ids"])
    return {"input_ids": row["input_ids"] + [pad_id] * missing,
            "attention_mask": [1] * len(row["input_ids"]) + [0] * missing,
            "token_type_ids": row["token_type_ids"] + [0] * missing,
            "start_positions": row["start_positions"], "end_positions": row["end_positions"]}


def run_trl(settings: dict, rounds: Rounds) -> None:
    """Run SFTTrainer. By default, it pads to the longest row and checkpoints gradients; on a CPU it computes the logits
    of all positions, in chunks, and their entropy.
    """
    tokenizer = AutoTokenizer.from_pretrained(f"{settings['folder']}/model")
    run_sft(settings, rounds, load_model(settings), tokenizer, peft_config=make_lora(settings))


def run_sft(settings: dict, rounds: Rounds, model: torch.nn.Module, tokenizer, **adapter) -> None:  # noqa: ANN001, ANN003
    """Run SFTTrainer with a model; `adapter` is empty if the model already has one."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    holder: dict = {}
    data = Dataset.from_list([{"input_ids": row["input_ids"], "labels": row.get("labels", row["input_ids"])}
                              for row in read_rows(settings["folder"])])
    holder["trainer"] = trainer = make_counting_class(SFTTrainer)(
        model=model, args=SFTConfig(**{"max_length": settings["length"], **trainer_arguments(settings)}),
        train_dataset=data, processing_class=tokenizer, callbacks=[make_callback(rounds, holder)], **adapter)
    record_start(rounds, trainer.model, settings)
    trainer.train()


def run_dpo(settings: dict, rounds: Rounds) -> None:
    """Run TRL's DPOTrainer on tokenised rows; its reference is the base without the adapter, like ours."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class TokenisedTrainer(make_counting_class(DPOTrainer)):
        def _prepare_dataset(self, dataset, *args, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN202
            return dataset

    holder: dict = {}
    holder["trainer"] = trainer = TokenisedTrainer(
        model=load_model(settings), peft_config=make_lora(settings),
        args=DPOConfig(**trainer_arguments(settings), remove_unused_columns=False),  # keeps `length`
        train_dataset=Dataset.from_list(
            [{**row, "length": pair_length(row)} for row in read_rows(settings["folder"])]),
        processing_class=AutoTokenizer.from_pretrained(f"{settings['folder']}/model"),
        callbacks=[make_callback(rounds, holder)])
    record_start(rounds, trainer.model, settings)
    trainer.train()


def run_grpo(settings: dict, rounds: Rounds) -> None:
    """Run TRL's GRPOTrainer on tokenised prompts; a step is a rollout."""
    from datasets import Dataset
    from rewarding import vowels
    from trl import GRPOConfig, GRPOTrainer

    def time_calls(method, part: str):  # noqa: ANN001, ANN202
        def call(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
            start = time.perf_counter()
            result = method(*args, **kwargs)
            rounds.record_time(part, time.perf_counter() - start)
            return result

        return call

    rows = read_rows(settings["folder"])
    ids = {row["prompt"]: row["prompt_ids"] for row in rows}

    class TimedTrainer(make_counting_class(GRPOTrainer)):
        def _tokenize_prompts(self, prompts):  # noqa: ANN001, ANN202
            return [ids[prompt] for prompt in prompts], None, {}

        def training_step(self, model, inputs, *args):  # noqa: ANN001, ANN002, ANN202
            return GRPOTrainer.training_step(self, model, inputs, *args)

        def _prepare_inputs(self, *args):  # noqa: ANN002, ANN202
            result = super()._prepare_inputs(*args)
            self.tokens = int(result["completion_mask"].sum())
            return result

        _generate = time_calls(GRPOTrainer._generate, "drawing")
        _calculate_rewards = time_calls(GRPOTrainer._calculate_rewards, "rewards")

    holder: dict = {}
    holder["trainer"] = trainer = TimedTrainer(
        model=load_model(settings), reward_funcs=vowels, peft_config=make_lora(settings),
        args=GRPOConfig(**trainer_arguments(settings), num_generations=settings["num_answers"],
                        max_completion_length=settings["answer_length"]),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(f"{settings['folder']}/model"),
        callbacks=[make_callback(rounds, holder)])
    record_start(rounds, trainer.model, settings)
    trainer.train()


def pair_length(row: dict) -> int:
    """Return the tokens of the prompt with the longer answer, by which pairs are grouped."""
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def generate_batches(settings: dict):  # noqa: ANN201
    """Yield random batches forever, padded to the longest row; tuned, of rows of similar length, as in Trainer."""
    rows = read_rows(settings["folder"])
    tokenizer = AutoTokenizer.from_pretrained(f"{settings['folder']}/model")
    fill = {"input_ids": tokenizer.pad_token_id, "labels": -100}
    lengths = [len(row["input_ids"]) for row in rows]
    is_grouped = settings["tuned"].get("group_by_length")
    while True:
        size = settings["batch_size"]
        order = (shuffle_batches(get_length_grouped_indices(lengths, size), size) if is_grouped else
                 torch.randperm(len(rows)).tolist())
        for start in range(0, len(order) - settings["batch_size"] + 1, settings["batch_size"]):
            batch_rows = [rows[i] for i in order[start : start + settings["batch_size"]]]
            batch = {name: pad_sequence([torch.tensor(row[name]) for row in batch_rows], True, value)
                     for name, value in fill.items()}
            batch_lengths = torch.tensor([len(row["input_ids"]) for row in batch_rows])
            mask = torch.arange(batch["input_ids"].shape[1]) < batch_lengths[:, None]
            yield {**batch, "attention_mask": mask.long()}


def run_loop(settings: dict, rounds: Rounds) -> None:
    """Run a loop without a trainer: for QLoRA like qlora.py, which checkpoints gradients by default; otherwise a bare
    loop.
    """
    model = load_model(settings)
    if settings["method"] != "full":
        from peft import get_peft_model, prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=settings["tuned"].get("gradient_checkpointing", True),
            gradient_checkpointing_kwargs={"use_reentrant": False})
        model = get_peft_model(model, make_lora(settings))
    record_start(rounds, model, settings)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    for batch in generate_batches(settings):
        with torch.autocast("cpu", torch.bfloat16, enabled=settings["bf16"]):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rounds.record_step(int(batch["attention_mask"].sum()))


if __name__ == "__main__":
    settings = read_settings()
    trl = {"preference": run_dpo, "grpo": run_grpo}.get(settings["task"], run_trl)
    runs = {"trainer": run_trainer, "trl": trl, "loop": run_loop}
    runs[settings["peer"]](settings, make_rounds(settings))
