"""Writes the demo assets: corpus, instructions, SQuAD files and tokenizer. The same seed gives the same bytes."""

from __future__ import annotations

import argparse
import json
import os
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from mistakes import wrong_answer, wrong_fact
from people import tagged_sentences
from skills import ARITHMETIC, CONVERSIONS, FORMATS, LISTS, SKILLS, STRINGS, Skill, is_held_out, operands_held_out
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from villages import squad, village_article
from world import FACTS, NAMES, FactTable

SEED = 7
TRAIN_CHARACTERS, VAL_CHARACTERS = 2_900_000, 80_000
TRAIN_ROWS, PAIRS, HELD_OUT_ROWS = 3_000, 2_400, 240
TAGGED_ROWS, TAGGED_HELD_OUT_ROWS = 1_600, 200
VOCABULARY = 1_536
CATEGORIES = ("arithmetic", "strings", "lists", "conversion", "facts", "formats")
# How often a corpus document practises each group; the hard skills get the larger share.
PRACTICE = [(ARITHMETIC, 34), (STRINGS, 24), (LISTS, 22), (CONVERSIONS, 8), (FORMATS, 12)]
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_NO_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def random_stream(*name: object) -> Random:
    """An independent stream of random numbers for each output, so that one file does not shift another."""
    return Random(":".join(str(part) for part in (SEED, *name)))


# ---- corpus ----

def practice_document(rng: Random) -> str:
    """Statements of the skills of one group, as a paragraph or one to a line."""
    group = rng.choices([skills for skills, _ in PRACTICE], [weight for _, weight in PRACTICE])[0]
    sentences = []
    while len(sentences) < 5:
        # One seed gives the skills of a group the same word, list or record: repetition teaches copying.
        seed = rng.getrandbits(32)
        for skill in rng.sample(group, min(len(group), rng.randint(1, 4))):
            values = skill.draw(Random(seed))
            if skill.is_knowledge or not operands_held_out(skill, values):
                sentences.append(rng.choice(skill.prose).format(name=rng.choice(NAMES), **values))
    return rng.choice((" ", "\n")).join(sentences).replace("\n ", "\n").replace("\n\n", "\n").strip()


def fact_article(rng: Random) -> str:
    tables = rng.sample(FACTS, rng.randint(1, 3))
    sentences = []
    for _ in range(rng.randint(4, 8)):
        table = rng.choice(tables)
        key, value = rng.choice(table.rows)
        sentences.append(rng.choice(table.prose).format(key=key, value=value))
    return rng.choice((" ", "\n")).join(sentences)


def fact_list(rng: Random) -> str:
    """Part of one fact table as CSV lines, JSON lines or bullets."""
    table = rng.choice(FACTS)
    rows = rng.sample(table.rows, min(len(table.rows), rng.randint(4, 8)))
    layout = rng.choice(("csv", "json", "bullets", "arrow"))
    if layout == "csv":
        lines = [",".join(table.columns)] + [f"{key},{value}" for key, value in rows]
    elif layout == "json":
        lines = [json.dumps(dict(zip(table.columns, row))) for row in rows]
    elif layout == "bullets":
        lines = [f"- {table.columns[1]} of {key}: {value}" for key, value in rows]
    else:
        lines = [f"{key} ({table.columns[1]}: {value})" for key, value in rows]
    return "\n".join(lines)


def corpus(part: str, characters: int) -> str:
    rng = random_stream("corpus", part)
    makers = [practice_document, fact_article, fact_list, village_article]
    documents, size = [], 0
    while size < characters:
        documents.append(rng.choices(makers, (72, 16, 7, 5))[0](rng))
        size += len(documents[-1]) + 2
    return "\n\n".join(documents) + "\n"


# ---- instructions ----

def worded(ask: str | tuple[str, str], values: dict, category: str, wrong: Callable[[Random], str]) -> dict:
    """A row, with a wrong answer that depends on its words alone."""
    instruction, text = (ask, "") if isinstance(ask, str) else ask
    asked = {"instruction": instruction.format(**values), "input": text.format(**values)}
    return {**asked, "output": str(values["answer"]), "category": category,
            "wrong": wrong(random_stream("wrong", *asked.values()))}


def choose_ask(asks: list, rng: Random) -> str | tuple[str, str]:
    """With or without an input, half and half, whatever the number of wordings of each form."""
    with_input = rng.random() < 0.5
    return rng.choice([ask for ask in asks if isinstance(ask, tuple) == with_input])


def skill_rows(skill: Skill, held_out: bool, rng: Random) -> Iterator[dict]:
    while True:
        values = skill.draw(rng)
        if operands_held_out(skill, values) == held_out:
            yield worded(choose_ask(skill.asks, rng), values, skill.category,
                         partial(wrong_answer, skill=skill.name, values=values))


def fact_rows(table: FactTable, held_out: bool, rng: Random) -> Iterator[dict]:
    """A fact is held out under one wording; the corpus states it and another wording may ask it in training."""
    while True:
        key, value = rng.choice(table.rows)
        ask = choose_ask(table.asks, rng)
        if is_held_out(table.name, key, ask) == held_out:
            yield worded(ask, {"key": key, "value": value, "answer": value}, "facts",
                         partial(wrong_fact, table=table, answer=value))


def instruction_rows(part: str, count: int, held_out: bool) -> list[dict]:
    """Rows without repetition, the categories balanced and the tasks inside a category taken in turn."""
    rng = random_stream("instructions", part)
    chosen: dict[tuple[str, str], dict] = {}
    for category in CATEGORIES:
        sources = [skill_rows(skill, held_out, rng) for skill in SKILLS if skill.category == category]
        if category == "facts":
            sources = [fact_rows(table, held_out, rng) for table in FACTS]
        goal = len(chosen) + count // len(CATEGORIES)
        for source in cycle(sources):
            if len(chosen) == goal:
                break
            row = next(source)
            chosen.setdefault((row["instruction"], row["input"]), row)
    rows = list(chosen.values())
    rng.shuffle(rows)
    return rows


def answered(row: dict) -> dict:
    """A row for fine-tuning."""
    return {name: row[name] for name in ("instruction", "input", "output", "category")}


def as_pair(row: dict) -> dict:
    """A row for preference optimisation: the right answer and a wrong one."""
    return {"instruction": row["instruction"], "input": row["input"], "chosen": row["output"],
            "rejected": row["wrong"], "category": row["category"]}


def with_strange_answer(row: dict, rows: list[dict], rng: Random) -> dict:
    """A row for a reward model: the right answer, and the right answer to another question."""
    strange = rng.choice([other["output"] for other in rows if other["output"] != row["output"]])
    return {**as_pair(row), "rejected": strange}


# ---- tokenizer ----

def alpaca_text(row: dict) -> str:
    template = ALPACA_INPUT if row["input"] else ALPACA_NO_INPUT
    return template.format(**row) + row["output"]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        model_max_length=512, clean_up_tokenization_spaces=False,
    )


def make_wordpiece(text: str) -> PreTrainedTokenizerFast:
    """A BERT-like tokenizer for the encoder tasks: all characters, then the most frequent words.

    Counted here: the library's WordPiece trainer gives another vocabulary each time.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(individual_digits=True)]
    )
    counts = Counter(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    characters = sorted(set("".join(counts)) | set(string.ascii_lowercase + string.digits + string.punctuation))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    entries = special + characters + [f"##{character}" for character in characters]
    words = sorted((word for word in counts if len(word) > 1), key=lambda word: (-counts[word], word))
    entries += words[: VOCABULARY - len(entries)]
    tokenizer = Tokenizer(models.WordPiece({entry: n for n, entry in enumerate(entries)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=512, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


# ---- files ----

def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def json_lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main(out: Path) -> None:
    train_text = corpus("train", TRAIN_CHARACTERS)
    rows = instruction_rows("train", TRAIN_ROWS, held_out=False)
    held_out_rows = instruction_rows("held_out", HELD_OUT_ROWS, held_out=True)
    write_text(out / "corpus/train.txt", train_text)
    write_text(out / "corpus/val.txt", corpus("val", VAL_CHARACTERS))
    pairs = instruction_rows("pairs", PAIRS, held_out=False)
    write_text(out / "instructions.jsonl", json_lines(list(map(answered, rows))))
    write_text(out / "instructions_heldout.jsonl", json_lines(list(map(answered, held_out_rows))))
    write_text(out / "preferences.jsonl", json_lines(list(map(as_pair, pairs))))
    write_text(out / "preferences_heldout.jsonl", json_lines(list(map(as_pair, held_out_rows))))
    for name, judged in (("rewards", pairs), ("rewards_heldout", held_out_rows)):
        rng = random_stream(name)
        write_text(out / f"{name}.jsonl", json_lines([with_strange_answer(row, judged, rng) for row in judged]))
    taken = set(re.findall("[A-Z][a-z]+", train_text))  # dev villages are in neither corpus nor train.json
    for part, passages, long_passages in (("train", 1_000, 8), ("dev", 60, 4)):
        articles = squad(part, passages, long_passages, random_stream("squad", part), taken)
        lines = ",\n".join(json.dumps(article) for article in articles)
        write_text(out / f"squad/{part}.json", f'{{"version": "v2.0", "data": [\n{lines}\n]}}\n')
    taken = set()  # held-out people and places are in no training row
    for name, count in (("people", TAGGED_ROWS), ("people_heldout", TAGGED_HELD_OUT_ROWS)):
        write_text(out / f"{name}.jsonl", json_lines(tagged_sentences(count, random_stream(name), taken)))
    train_tokenizer([train_text, *map(alpaca_text, rows)]).save_pretrained(out / "llama")
    make_wordpiece(train_text).save_pretrained(out / "bert")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    main(parser.parse_args().out)
