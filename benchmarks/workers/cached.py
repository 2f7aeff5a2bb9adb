"""Start on rows in the cache, and print the seconds and megabytes as one JSON object.

The rows have 10 to 20 random tokens each. The first process writes them to the cache. The second process finds them
there and is measured, from `setup("fit")` to the first batch and the report.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rounds import read_settings


def main() -> None:
    settings = read_settings()
    sys.path.insert(0, settings["root"])
    import numpy as np

    from lmmods.data.encode.encoder import Encoded, Ragged
    from lmmods.data.sft import SFTCodec, SFTData

    class RandomTokens:
        """Encoder that ignores its rows."""

        def __init__(self) -> None:
            self._random = np.random.default_rng(0)

        def __call__(self, rows: list[dict[str, Any]]) -> Encoded:
            count = len(rows)
            lengths = self._random.integers(10, 21, count)
            ids = Ragged(self._random.integers(10, 500, lengths.sum(), dtype=np.int32), lengths)
            columns = {"input_ids": ids, "labels": ids, "weight": np.ones(count, np.float32),
                       "prompt_length": np.full(count, 5), "truncated": np.zeros(count, np.int64)}
            return Encoded(columns, np.arange(count), [], Counter(tokens=int(lengths.sum())))

    class RandomCodec(SFTCodec):
        """Codec with random tokens."""

        def make_encoder(self, *source: Any) -> tuple[RandomTokens, dict[str, Any]]:
            return RandomTokens(), super().make_encoder(*source)[1]

    class RandomRows(SFTData):
        """Data with random tokens."""

        codec_class = RandomCodec

    path = Path(settings["folder"]) / f"{settings['rows']}.jsonl"
    if not path.exists():
        row = json.dumps({"instruction": "a question", "output": "an answer of some words"}) + "\n"
        with path.open("w") as file:
            for _ in range(settings["rows"] // 1000):
                file.write(row * 1000)
    data = RandomRows(str(path), tokenizer=settings["tokenizer"], template="alpaca", max_length=128, batch_size=8,
                      num_proc=1, cache_dir=settings["folder"], **settings["options"])
    data.tokenizer  # noqa: B018 - load it before measuring
    before, cpu, wall = private_memory(), time.process_time(), time.perf_counter()
    data.setup("fit")
    next(iter(data.train_batches()))
    data.report  # noqa: B018
    print(json.dumps({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall,
                      "megabytes": private_memory() - before}))


def private_memory() -> float:
    """Return the private memory of this process in megabytes, without mapped files, which are in the system's cache."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1000


if __name__ == "__main__":
    main()
