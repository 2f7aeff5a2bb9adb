"""Write the work of a benchmark into a folder: a random model, a tokenizer, data and our recipe."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from data import make_text, make_vocabulary, write_instructions, write_pairs

WIDTH = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    # Tunix's Llama uses this rope_theta, whatever the configuration says.
    "llama-a": {"model_type": "llama", **WIDTH, "intermediate_size": 704, "vocab_size": 8_000,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
    "llama-b": {"model_type": "llama", "hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6,
                "intermediate_size": 1024, "vocab_size": 32_000, "tie_word_embeddings": True},
    # TinyLlama.
    "llama-1b": {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
                 "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32_000},
    "gpt2": {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 50_257,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"model_type": "bert", **WIDTH, "intermediate_size": 1024, "vocab_size": 30_522, **NO_DROPOUT},
    "roberta": {"model_type": "roberta", **WIDTH, "intermediate_size": 1024, "vocab_size": 50_265, **NO_DROPOUT},
    "tiny": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 176, "vocab_size": 1_000},
}
TEMPLATE = ("Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n### Instruction:\n\n### Input:\n\n"
            "### Response:\n")
CLASSES = {"sft": "CausalLM", "clm": "CausalLM", "mlm": "MaskedLM", "qa": "QuestionAnswering",
           "preference": "CausalLM", "grpo": "CausalLM", "sequence_classification": "SequenceClassification",
           "token_classification": "TokenClassification"}
TASKS = {"sft": ("SFT", "SFTData"), "clm": ("CLM", "CLMData"), "mlm": ("MLM", "MLMData"), "qa": ("QA", "QAData"),
         "preference": ("Preference", "PreferenceData"), "grpo": ("GRPO", "PromptData"),
         "sequence_classification": ("SequenceClassification", "SequenceClassificationData"),
         "token_classification": ("TokenClassification", "TokenClassificationData")}
LABELS = {  # of MNLI and of CoNLL-2003
    "sequence_classification": ["contradiction", "entailment", "neutral"],
    "token_classification": ["B-LOC", "B-MISC", "B-ORG", "B-PER", "I-LOC", "I-MISC", "I-ORG", "I-PER", "O"]}
ENCODER_TASKS = ("mlm", "qa", *LABELS)
NUM_ANSWERS, ANSWER_LENGTH = 8, 64  # per prompt in GRPO
RANK = 16  # of adapters
REWARD = "rewarding.vowels"  # in workers/


@dataclass(frozen=True)
class Work:
    """A model, a task and the size of a step.

    Args:
        task: Name of the task.
        model: Key of CONFIGS.
        length: Maximum row length in tokens.
        batch_size: Rows per step; in GRPO, answers per step, which is a rollout.
        method: Full fine-tuning, or an adapter on the full or quantised base.
        rows: File of instructions to train on instead of generated ones (`--rows`).
        tokenizer: Tokenizer (`--tokenizer`). If it is None or too large for the model, one is trained on the text.
        num_rows: Number of rows to generate.
        dtype: Type of the random weights.
    """

    task: Literal["sft", "clm", "mlm", "qa", "preference", "grpo", "sequence_classification",
                  "token_classification"]
    model: str
    length: int = 512
    batch_size: int = 8
    method: Literal["full", "lora", "qlora"] = "full"
    rows: str | None = None
    tokenizer: str | None = None
    num_rows: int = 2_000
    dtype: Literal["float32", "bfloat16"] = "float32"

    def write(self, folder: Path) -> None:
        """Write model/, the data, recipe.yaml, and rows.jsonl and check.json for the peers."""
        folder.mkdir(parents=True)
        source = self._write_source(folder)
        self._write_model(folder / "model", source)
        recipe = self._recipe(folder, source)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (self._write_prompts if self.task == "grpo" else self.write_rows)(folder, recipe["data"]["init_args"])

    def _write_source(self, folder: Path) -> Path:
        if self.task == "sft" and self.rows:
            return Path(self.rows)
        names = {**dict.fromkeys(("sft", "grpo"), "rows.source.jsonl"), "preference": "pairs.source.jsonl",
                 "qa": "squad.json", **dict.fromkeys(LABELS, "labelled.source.jsonl")}
        path = folder / names.get(self.task, "corpus.txt")
        if self.task in ("sft", "grpo"):
            write_instructions(path, self.num_rows)
        elif self.task == "preference":
            write_pairs(path, self.num_rows)
        elif self.task == "qa":
            write_questions(path, self.num_rows)
        elif self.task == "sequence_classification":
            write_labelled_pairs(path, self.num_rows)
        elif self.task == "token_classification":
            write_tagged_words(path, self.num_rows)
        else:
            write_text(path, tokens=self.num_rows * self.length)
        return path

    def _write_model(self, folder: Path, source: Path) -> None:
        import torch
        import transformers

        num_rows = CONFIGS[self.model]["vocab_size"]
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.tokenizer) if self.tokenizer else None
        if tokenizer is None or len(tokenizer) > num_rows:
            tokenizer = train_tokenizer(source, num_rows, self.task in ENCODER_TASKS)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.unk_token or tokenizer.eos_token
        fields = dict(CONFIGS[self.model])
        # RoBERTa starts its positions after the padding id.
        fields[{"gpt2": "n_positions"}.get(self.model, "max_position_embeddings")] = max(self.length, 512) + 8
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        labels = {"num_labels": len(LABELS[self.task])} if self.task in LABELS else {}
        config = transformers.CONFIG_MAPPING[fields.pop("model_type")](**fields, **special, **labels)
        torch.manual_seed(0)
        model_class = getattr(transformers, f"AutoModelFor{CLASSES[self.task]}")
        model = model_class.from_config(config, dtype=getattr(torch, self.dtype))
        if self.task == "grpo":
            ban_end_token(model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        settings = folder / "tokenizer_config.json"  # it names a class that older versions of transformers lack
        fields = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings.write_text(json.dumps(fields))

    def _recipe(self, folder: Path, source: Path) -> dict[str, Any]:
        method = {"qlora": {"quantize": "nf4"}}.get(self.method, {})
        lora = {} if self.method == "full" else {"lora": {"rank": RANK, "alpha": 2 * RANK}}
        data = {"sft": {"template": "alpaca", "group_by_length": True}, "clm": {"documents": "line"},
                "mlm": {"documents": "line"}, "qa": {"stride": 128, "group_by_length": True},
                "preference": {"template": "alpaca", "group_by_length": True}, "grpo": {"template": "alpaca"},
                **dict.fromkeys(LABELS, {"group_by_length": True})}[self.task]
        task = {"grpo": {"num_generations": NUM_ANSWERS, "max_new_tokens": ANSWER_LENGTH,
                         "rewards": [{"function": REWARD}]}}.get(self.task, {})
        module, data_module = TASKS[self.task]
        return {
            "seed_everything": 1,
            "trainer": {"max_steps": 100_000, "accelerator": "cpu", "devices": 1, "gradient_clip_val": 1.0,
                        "num_sanity_val_steps": 0, "enable_checkpointing": False, "enable_progress_bar": False},
            "model": {"class_path": module, "init_args": {
                "pretrained": str(folder / "model"), **method, **lora, **task, "optimizer": {"lr": 1e-4}}},
            "data": {"class_path": data_module, "init_args": {
                "source": str(source), "max_length": self.length, "batch_size": self.batch_size,
                "cache_dir": str(folder / "cache"), **data}},
        }

    def write_rows(self, folder: Path, fields: dict[str, Any]) -> None:
        """Write rows.jsonl, all rows as our data module encodes them, and check.json, a batch of the first ones.

        Args:
            folder: Contains model/ with the tokenizer.
            fields: Data fields of the recipe.
        """
        import importlib

        data_class = getattr(importlib.import_module(f"lmmods.data.{self.task}"), TASKS[self.task][1])
        # The span loss of transformers includes padding, so the check batch for QA is one row.
        size = 1 if self.task == "qa" else 4
        check = data_class(**{**fields, "shuffle": False, "batch_size": size, "group_by_length": False,
                              "pad_to_multiple_of": 1}, tokenizer=str(folder / "model"), seed=1)
        check.setup("fit")
        (folder / "check.json").write_text(json.dumps(
            {name: value.tolist() for name, value in next(iter(check.train_batches())).items()}))
        single = data_class(**{**fields, "shuffle": False, "batch_size": 1, "group_by_length": False,
                               "pad_to_multiple_of": 1}, tokenizer=str(folder / "model"), seed=1)
        single.setup("fit")
        with (folder / "rows.jsonl").open("w") as file:
            for batch in single.train_batches():
                if self.task == "preference":
                    file.write(json.dumps(_to_trl_pair(batch)) + "\n")
                    continue
                row = {name: value[0].tolist() for name, value in batch.items()}
                if self.task == "mlm":  # restore the tokens before masking
                    row["input_ids"] = [token if label == -100 else label
                                        for token, label in zip(row["input_ids"], row["labels"], strict=True)]
                if len(row["input_ids"]) == self.length or self.task not in ("clm", "mlm"):  # full blocks only
                    file.write(json.dumps(row) + "\n")

    def _write_prompts(self, folder: Path, fields: dict[str, Any]) -> None:
        """Write all prompts as our data module encodes them, and a check batch that labels second halves of prompts."""
        import torch

        from lmmods.data.grpo import PromptData

        data = PromptData(**fields, tokenizer=str(folder / "model"), seed=1)
        data.connect(new_tokens=ANSWER_LENGTH)
        data.setup("fit")
        prompts = [data.prompt("train", index).ids for index in range(data.num_prompts("train"))]
        with (folder / "rows.jsonl").open("w") as file:
            for ids in prompts:
                file.write(json.dumps({"prompt": data.tokenizer.decode(ids), "prompt_ids": ids}) + "\n")
        pad = torch.nn.utils.rnn.pad_sequence
        rows = [torch.tensor(ids) for ids in prompts[:4]]
        labels = [row.where(torch.arange(len(row)) >= len(row) // 2, -100) for row in rows]
        check = {"input_ids": pad(rows, True), "attention_mask": pad([torch.ones_like(row) for row in rows], True),
                 "labels": pad(labels, True, -100)}
        (folder / "check.json").write_text(json.dumps({name: value.tolist() for name, value in check.items()}))


def ban_end_token(model: Any) -> None:
    """Change a Llama so that it never samples its end token, and all answers have the same length.

    The first hidden feature becomes the same for every token, and the only input of the end token's logit.
    """
    import torch

    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.05
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[:, 0] = model.lm_head.weight[model.config.eos_token_id] = 0
        model.lm_head.weight[model.config.eos_token_id, 0] = -100


def _to_trl_pair(batch: dict[str, Any]) -> dict[str, list[int]]:
    """Convert a batch of one pair to TRL's format: ids of the prompt and of each answer."""
    answers = [(ids[mask.bool()].tolist(), (labels >= 0).tolist()) for ids, mask, labels in zip(
        batch["input_ids"][0], batch["attention_mask"][0], batch["labels"][0], strict=True)]
    first = answers[0][1].index(True)
    return {"prompt_ids": answers[0][0][:first], "chosen_ids": answers[0][0][first:],
            "rejected_ids": answers[1][0][first:]}


def write_text(path: Path, tokens: int) -> None:
    """Write lines of a hundred invented words, with about this total number of tokens."""
    rng = random.Random(2)
    vocabulary = make_vocabulary(rng)
    path.write_text("\n".join(make_text(100, rng, vocabulary) for _ in range(tokens // 130)))


def write_questions(path: Path, count: int) -> None:
    """Write questions in SQuAD's layout, with lengths like SQuAD's."""
    rng = random.Random(3)
    vocabulary = make_vocabulary(rng)
    paragraphs = []
    for paragraph_index in range(count // 5):
        context = make_text(min(max(int(rng.lognormvariate(4.7, 0.4)), 30), 500), rng, vocabulary)
        context_words = context.split(" ")
        questions = []
        for question_index in range(5):
            first = rng.randrange(len(context_words) - 4)
            answer = {"text": " ".join(context_words[first : first + rng.randint(1, 4)]),
                      "answer_start": len(" ".join(context_words[:first])) + (first > 0)}
            questions.append({"id": f"{paragraph_index}-{question_index}", "answers": [answer],
                              "question": make_text(rng.randint(6, 16), rng, vocabulary) + "?"})
        paragraphs.append({"context": context, "qas": questions})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "", "paragraphs": paragraphs}]}))


def write_labelled_pairs(path: Path, count: int) -> None:
    """Write pairs of sentences with a label, with lengths like MNLI's; some exceed 128 tokens."""
    rng = random.Random(5)
    vocabulary = make_vocabulary(rng)
    with path.open("w") as file:
        for _ in range(count):
            sentences = {name: make_text(min(int(rng.lognormvariate(mean, spread)) + 1, 120), rng, vocabulary)
                         for name, mean, spread in (("premise", 2.9, 0.6), ("hypothesis", 2.3, 0.4))}
            file.write(json.dumps({**sentences, "label": rng.choice(LABELS["sequence_classification"])}) + "\n")


def write_tagged_words(path: Path, count: int) -> None:
    """Write sentences with a tag per word, with lengths like CoNLL-2003's."""
    rng = random.Random(6)
    vocabulary = make_vocabulary(rng)
    with path.open("w") as file:
        for _ in range(count):
            tokens = make_text(min(int(rng.lognormvariate(2.4, 0.7)) + 1, 120), rng, vocabulary).split(" ")
            tags = rng.choices(LABELS["token_classification"], k=len(tokens))
            file.write(json.dumps({"tokens": tokens, "ner_tags": tags}) + "\n")


def train_tokenizer(source: Path, vocab_size: int, for_encoder: bool) -> Any:
    """Train a byte-level BPE tokenizer on the data. For an encoder, it adds start and end tokens around texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "<s>", "</s>", "[MASK]", "[UNK]"]
    bpe = Tokenizer(models.BPE(unk_token="[UNK]"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    # With the template's words, otherwise each row would start with a hundred fragments.
    bpe.train_from_iterator([*source.read_text().split("\n"), *[TEMPLATE] * 50], trainer)
    if for_encoder:
        bpe.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)])
    roles = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "[MASK]"} if for_encoder else {}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="[PAD]",
                                   unk_token="[UNK]", **roles)
