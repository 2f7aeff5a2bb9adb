"""Write the demo assets: corpus, instructions, SQuAD files and tokenizers. The same seed gives the same bytes."""

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

from mistakes import choose_wrong_fact, make_wrong_answer
from people import make_sentences
from skills import ARITHMETIC, CONVERSIONS, FORMATS, LISTS, SKILLS, STRINGS, Skill, has_held_out_operands, is_held_out
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from villages import make_articles, write_article
from world import FACTS, NAMES, FactTable

SEED = 7
TRAIN_CHARACTERS, VAL_CHARACTERS = 2_900_000, 80_000
TRAIN_ROWS, PAIRS, HELD_OUT_ROWS = 3_000, 2_400, 240
TAGGED_ROWS, TAGGED_HELD_OUT_ROWS = 1_600, 200
VOCABULARY = 1_536
CATEGORIES = ("arithmetic", "strings", "lists", "conversion", "facts", "formats")
# How often a corpus document practises each group; hard skills more often.
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


def make_random(*name: object) -> Random:
    """Return an independent random generator for an output, so that one file does not shift another."""
    return Random(":".join(str(part) for part in (SEED, *name)))


# ---- corpus ----

def write_practice(rng: Random) -> str:
    """Write statements of the skills of one group, as a paragraph or one per line."""
    group = rng.choices([skills for skills, _ in PRACTICE], [weight for _, weight in PRACTICE])[0]
    sentences = []
    while len(sentences) < 5:
        # With one seed, the skills of a group get the same word, list or record: repetition teaches copying.
        seed = rng.getrandbits(32)
        for skill in rng.sample(group, min(len(group), rng.randint(1, 4))):
            values = skill.sample(Random(seed))
            if skill.is_knowledge or not has_held_out_operands(skill, values):
                sentences.append(rng.choice(skill.prose).format(name=rng.choice(NAMES), **values))
    return rng.choice((" ", "\n")).join(sentences).replace("\n ", "\n").replace("\n\n", "\n").strip()


def write_facts(rng: Random) -> str:
    tables = rng.sample(FACTS, rng.randint(1, 3))
    sentences = []
    for _ in range(rng.randint(4, 8)):
        table = rng.choice(tables)
        key, value = rng.choice(table.rows)
        sentences.append(rng.choice(table.prose).format(key=key, value=value))
    return rng.choice((" ", "\n")).join(sentences)


def write_fact_list(rng: Random) -> str:
    """Write part of one fact table as CSV lines, JSON lines or bullets."""
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


def write_corpus(part: str, characters: int) -> str:
    rng = make_random("corpus", part)
    makers = [write_practice, write_facts, write_fact_list, write_article]
    documents, size = [], 0
    while size < characters:
        documents.append(rng.choices(makers, (72, 16, 7, 5))[0](rng))
        size += len(documents[-1]) + 2
    return "\n\n".join(documents) + "\n"


# ---- instructions ----

def make_row(ask: str | tuple[str, str], values: dict, category: str, wrong: Callable[[Random], str]) -> dict:
    """Return a row, with a wrong answer that depends only on the question's words."""
    instruction, text = (ask, "") if isinstance(ask, str) else ask
    question = {"instruction": instruction.format(**values), "input": text.format(**values)}
    return {**question, "output": str(values["answer"]), "category": category,
            "wrong": wrong(make_random("wrong", *question.values()))}


def choose_ask(asks: list, rng: Random) -> str | tuple[str, str]:
    """Choose a wording, half of the time one with an input, whatever the number of wordings of each form."""
    has_input = rng.random() < 0.5
    return rng.choice([ask for ask in asks if isinstance(ask, tuple) == has_input])


def generate_skill_rows(skill: Skill, held_out: bool, rng: Random) -> Iterator[dict]:
    while True:
        values = skill.sample(rng)
        if has_held_out_operands(skill, values) == held_out:
            yield make_row(choose_ask(skill.asks, rng), values, skill.category,
                           partial(make_wrong_answer, skill=skill.name, values=values))


def generate_fact_rows(table: FactTable, held_out: bool, rng: Random) -> Iterator[dict]:
    """Generate questions about facts.

    A fact is held out under one wording: the corpus states it, and training may ask it with another wording.
    """
    while True:
        key, value = rng.choice(table.rows)
        ask = choose_ask(table.asks, rng)
        if is_held_out(table.name, key, ask) == held_out:
            yield make_row(ask, {"key": key, "value": value, "answer": value}, "facts",
                           partial(choose_wrong_fact, table=table, answer=value))


def sample_instruction_rows(part: str, count: int, held_out: bool) -> list[dict]:
    """Return distinct rows, with balanced categories and the tasks of a category in turn."""
    rng = make_random("instructions", part)
    chosen: dict[tuple[str, str], dict] = {}
    for category in CATEGORIES:
        sources = [generate_skill_rows(skill, held_out, rng) for skill in SKILLS if skill.category == category]
        if category == "facts":
            sources = [generate_fact_rows(table, held_out, rng) for table in FACTS]
        goal = len(chosen) + count // len(CATEGORIES)
        for source in cycle(sources):
            if len(chosen) == goal:
                break
            row = next(source)
            chosen.setdefault((row["instruction"], row["input"]), row)
    rows = list(chosen.values())
    rng.shuffle(rows)
    return rows


def to_sft_row(row: dict) -> dict:
    """Return a row for fine-tuning."""
    return {name: row[name] for name in ("instruction", "input", "output", "category")}


def to_pair(row: dict) -> dict:
    """Return a row for preference optimisation: the right answer and a wrong one."""
    return {"instruction": row["instruction"], "input": row["input"], "chosen": row["output"],
            "rejected": row["wrong"], "category": row["category"]}


def to_reward_row(row: dict, rows: list[dict], rng: Random) -> dict:
    """Return a row for a reward model: the right answer, and the right answer to another question."""
    other_answer = rng.choice([other["output"] for other in rows if other["output"] != row["output"]])
    return {**to_pair(row), "rejected": other_answer}


# ---- tokenizer ----

def render_alpaca(row: dict) -> str:
    template = ALPACA_INPUT if row["input"] else ALPACA_NO_INPUT
    return template.format(**row) + row["output"]


def train_bpe(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = ["<s>", "</s>", "<pad>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special_tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
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


def build_wordpiece(text: str) -> PreTrainedTokenizerFast:
    """Build a BERT-like tokenizer for the encoder tasks: all characters, then the most frequent words.

    The words are counted here, as the library's WordPiece trainer gives another vocabulary each time.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(individual_digits=True)]
    )
    counts = Counter(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    characters = sorted(set("".join(counts)) | set(string.ascii_lowercase + string.digits + string.punctuation))
    special_tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    entries = special_tokens + characters + [f"##{character}" for character in characters]
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


def to_json_lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main(out: Path) -> None:
    train_text = write_corpus("train", TRAIN_CHARACTERS)
    rows = sample_instruction_rows("train", TRAIN_ROWS, held_out=False)
    held_out_rows = sample_instruction_rows("held_out", HELD_OUT_ROWS, held_out=True)
    write_text(out / "corpus/train.txt", train_text)
    write_text(out / "corpus/val.txt", write_corpus("val", VAL_CHARACTERS))
    pairs = sample_instruction_rows("pairs", PAIRS, held_out=False)
    write_text(out / "instructions.jsonl", to_json_lines(list(map(to_sft_row, rows))))
    write_text(out / "instructions_heldout.jsonl", to_json_lines(list(map(to_sft_row, held_out_rows))))
    write_text(out / "preferences.jsonl", to_json_lines(list(map(to_pair, pairs))))
    write_text(out / "preferences_heldout.jsonl", to_json_lines(list(map(to_pair, held_out_rows))))
    for name, reward_pairs in (("rewards", pairs), ("rewards_heldout", held_out_rows)):
        rng = make_random(name)
        reward_rows = [to_reward_row(row, reward_pairs, rng) for row in reward_pairs]
        write_text(out / f"{name}.jsonl", to_json_lines(reward_rows))
    used_names = set(re.findall("[A-Z][a-z]+", train_text))  # dev villages are in neither corpus nor train.json
    for part, passages, long_passages in (("train", 1_000, 8), ("dev", 60, 4)):
        articles = make_articles(part, passages, long_passages, make_random("squad", part), used_names)
        lines = ",\n".join(json.dumps(article) for article in articles)
        write_text(out / f"squad/{part}.json", f'{{"version": "v2.0", "data": [\n{lines}\n]}}\n')
    used_names = set()  # held-out people and places are in no training row
    for name, count in (("people", TAGGED_ROWS), ("people_heldout", TAGGED_HELD_OUT_ROWS)):
        write_text(out / f"{name}.jsonl", to_json_lines(make_sentences(count, make_random(name), used_names)))
    train_bpe([train_text, *map(render_alpaca, rows)]).save_pretrained(out / "llama")
    build_wordpiece(train_text).save_pretrained(out / "bert")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    main(parser.parse_args().out)
