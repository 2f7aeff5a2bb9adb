"""A start on rows in the cache: prints one JSON object with its seconds and megabytes.

The rows are of 10 to 20 random tokens each. They are written to the cache by the first process, and the second one,
which finds them there, is measured: from `setup("fit")` to the first batch and the report.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rounds import settings


def main() -> None:
    asked = settings()
    sys.path.insert(0, asked["root"])
    import numpy as np

    from lmmods.data.encode.encoder import Encoded, Ragged
    from lmmods.data.sft import SFTCodec, SFTData

    class RandomTokens:
        """An encoder that does not look at its rows."""

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
        """Instructions whose tokens are random."""

        def make_encoder(self, *source: Any) -> tuple[RandomTokens, dict[str, Any]]:
            return RandomTokens(), super().make_encoder(*source)[1]

    class RandomRows(SFTData):
        """Data with such a codec."""

        codec_class = RandomCodec

    path = Path(asked["folder"]) / f"{asked['rows']}.jsonl"
    if not path.exists():
        row = json.dumps({"instruction": "a question", "output": "an answer of some words"}) + "\n"
        with path.open("w") as file:
            for _ in range(asked["rows"] // 1000):
                file.write(row * 1000)
    data = RandomRows(str(path), tokenizer=asked["tokenizer"], template="alpaca", max_length=128, batch_size=8,
                      num_proc=1, cache_dir=asked["folder"], **asked["options"])
    data.tokenizer  # noqa: B018 - loaded before anything is measured
    before, cpu, wall = own_memory(), time.process_time(), time.perf_counter()
    data.setup("fit")
    next(iter(data.train_batches()))
    data.report  # noqa: B018
    print(json.dumps({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall,
                      "megabytes": own_memory() - before}))


def own_memory() -> float:
    """Megabytes that this process alone holds; pages of files that it maps belong to the system's cache."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1000


if __name__ == "__main__":
    main()
