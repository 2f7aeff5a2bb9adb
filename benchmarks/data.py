"""Measure speed and memory of the data layer on generated text.

    python benchmarks/data.py                 tokenising, packing, an epoch of batches
    python benchmarks/data.py --corpus_mb 1000  the same, and time and peak memory of a text corpus of that size

Tokenising is compared with `encode_batch` of the tokenizers library on the same rendered texts and cores. Both run
three times in turn, and the fastest run of each counts, as other work on the machine disturbs single runs.

README.md in this folder has the last figures.
"""

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lmmods.data.clm import CLMData
from lmmods.data.sft import SFTData

MEBIBYTE = 1 << 20


def make_text(count: int, rng: random.Random, vocabulary: list[str]) -> str:
    """Return a text of `count` words with Zipf-like frequencies."""
    return " ".join(vocabulary[min(int(rng.paretovariate(0.9)), len(vocabulary)) - 1] for _ in range(count))


def make_vocabulary(rng: random.Random) -> list[str]:
    """Return 20,000 invented words."""
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "ost")]
    return ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(20_000)]


def write_instructions(path: Path, num_rows: int) -> None:
    """Write rows with lengths like alpaca's."""
    rng = random.Random(0)
    vocabulary = make_vocabulary(rng)
    with path.open("w") as file:
        for _ in range(num_rows):
            row = {
                "instruction": make_text(rng.randint(5, 25), rng, vocabulary),
                "input": make_text(rng.randint(5, 30), rng, vocabulary) if rng.random() < 0.4 else "",
                "output": make_text(min(int(rng.lognormvariate(3.4, 0.9)) + 1, 400), rng, vocabulary),
            }
            file.write(json.dumps(row) + "\n")


def write_pairs(path: Path, num_rows: int) -> None:
    """Write instructions with two answers each, with lengths like alpaca's."""
    rng = random.Random(4)
    vocabulary = make_vocabulary(rng)
    with path.open("w") as file:
        for _ in range(num_rows):
            answers = {name: make_text(min(int(rng.lognormvariate(3.4, 0.9)) + 1, 400), rng, vocabulary)
                       for name in ("chosen", "rejected")}
            file.write(json.dumps({"prompt": make_text(rng.randint(10, 50), rng, vocabulary), **answers}) + "\n")


def time_tasks(runs: int, *tasks) -> list[float]:  # noqa: ANN002
    """Run the tasks in turn and return the shortest time of each."""
    times: list[list[float]] = [[] for _ in tasks]
    for _ in range(runs):
        for index, task in enumerate(tasks):
            start = time.perf_counter()
            task()
            times[index].append(time.perf_counter() - start)
    return [min(task_times) for task_times in times]


def measure_rows(tokenizer: str, folder: Path, num_rows: int, num_proc: int) -> None:
    """Compare tokenising and packing with the raw encoder, then time an epoch of packed and of padded batches."""
    path = folder / "rows.jsonl"
    write_instructions(path, num_rows)
    data = SFTData(
        str(path),
        tokenizer=tokenizer,
        template="alpaca",
        max_length=1024,
        batch_size=4,
        packing=True,
        num_proc=num_proc,
        cache_dir=str(folder / "cache"),
    )
    data.setup("fit")
    encoder = data.codec.conversation_encoder("alpaca", False)
    texts = []
    for line in path.open():
        row, = encoder.renderer.rows(encoder.conversation(json.loads(line)), "all")
        texts.append("".join(segment.text for segment in row.segments))
    raw = Tokenizer.from_str(data.tokenizer.backend_tokenizer.to_str())

    def encode_raw() -> None:
        for start in range(0, len(texts), 1000):
            _ = [encoding.ids for encoding in raw.encode_batch(texts[start : start + 1000])]

    def encode_ours() -> None:
        shutil.rmtree(folder / "cache")
        fresh = SFTData(
            str(path),
            tokenizer=tokenizer,
            template="alpaca",
            max_length=1024,
            packing=True,
            num_proc=num_proc,
            cache_dir=str(folder / "cache"),
        )
        fresh._tokenizer = data._tokenizer  # its loading is not part of encoding
        fresh.setup("fit")
        fresh.items("train")

    raw_time, our_time = time_tasks(3, encode_raw, encode_ours)
    items = data.items("train")
    tokens = int(items.lengths.sum())
    print(f"raw encode_batch     {tokens / raw_time:12,.0f} tokens/s")
    print(f"read+encode+store+pack {tokens / our_time:10,.0f} tokens/s   {raw_time / our_time:.0%} of raw")
    print(f"packs of 1024        {tokens / (1024 * len(items)):12.1%} full")
    print(f"epoch of packed 4 x 1024 batches  {epoch_rate(data):10,.0f} tokens/s")
    padded = SFTData(
        str(path),
        tokenizer=tokenizer,
        template="alpaca",
        max_length=1024,
        batch_size=4,
        cache_dir=str(folder / "cache"),
    )
    padded.setup("fit")
    print(f"epoch of padded batches of 4      {epoch_rate(padded):10,.0f} tokens/s")


def epoch_rate(data: SFTData) -> float:
    """Return the real tokens per second of one epoch from the cache."""
    loader = data.train_batches()
    start = time.perf_counter()
    tokens = sum(int(batch["attention_mask"].sum()) for batch in loader)
    return tokens / (time.perf_counter() - start)


def write_corpus(path: Path, megabytes: int) -> None:
    """Write a text file of paragraphs sampled from 2,000, which for speed and memory is as good as new text."""
    rng = random.Random(1)
    vocabulary = make_vocabulary(rng)
    paragraphs = [make_text(rng.randint(40, 200), rng, vocabulary) for _ in range(2000)]
    with path.open("w") as file:
        while file.tell() < megabytes * MEBIBYTE:
            file.write("\n".join(rng.choices(paragraphs, k=500)) + "\n")


def measure_corpus(tokenizer: str, folder: Path, megabytes: int, num_proc: int) -> None:
    """Encode a corpus, then read batches from it; print the time and the peak memory of this process."""
    path = folder / "corpus.txt"
    if not path.exists():
        write_corpus(path, megabytes)
    data = CLMData(
        str(path),
        tokenizer=tokenizer,
        max_length=1024,
        batch_size=8,
        num_proc=num_proc,
        cache_dir=str(folder / "cache"),
    )
    data.tokenizer  # noqa: B018 - load it before measuring memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    data.setup("fit")
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    items = data.items("train")
    tokens = int(items.lengths.sum())
    print(
        f"{megabytes} MiB of text: {tokens:,} tokens in {seconds:,.0f} s, {megabytes / seconds:.1f} MiB/s, "
        f"memory {before:,.0f} MiB before, peak {peak:,.0f} MiB"
    )
    for _, batch in zip(range(2000), data.train_batches(), strict=False):
        np.asarray(batch["input_ids"])
    print(
        f"after 2,000 batches of 8 x 1024: peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB "
        "(mapped pages of the store included)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="demo/llama", help="folder with a tokenizer")
    parser.add_argument("--num_rows", type=int, default=30_000)
    parser.add_argument("--num_proc", type=int, default=1)
    parser.add_argument("--corpus_mb", type=int, default=0)
    parser.add_argument("--corpus_only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.corpus_only:
        measure_corpus(options.tokenizer, Path(options.corpus_only), options.corpus_mb, options.num_proc)
        return
    with tempfile.TemporaryDirectory() as name:
        measure_rows(options.tokenizer, Path(name), options.num_rows, options.num_proc)
        if options.corpus_mb:  # in a separate process, for its peak memory
            subprocess.run([sys.executable, *sys.argv, "--corpus_only", name], check=True)


if __name__ == "__main__":
    main()
