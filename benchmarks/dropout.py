"""What dropout by token costs beside torch's own: a step on the CPU with a rate of 0.1, on the same rows.

    python benchmarks/dropout.py [--rounds 7] [--lengths 256 512]

Two networks of the same weights step in turn, forward and backward, one with `TokenDropout` and one as transformers
made it; a ratio is one of median CPU times. A third, without dropout, tells what either adds.
"""

import argparse
import copy
import statistics
import time

import numpy as np
import torch
import transformers
from torch import nn
from work import CLASSES, CONFIGS

from lmmods.core.dropout import token_seeds
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.nn.lm_head import LMHead, causal_loss
from lmmods.torch_engine.tasks.mlm import MLMHead, masked_loss

RATE, BATCH_SIZE = 0.1, 8


def networks(name: str, task: str, length: int) -> dict[str, nn.Module]:
    """The same weights with our dropout, with torch's, and with none."""
    fields = {**CONFIGS[name], {"gpt2": "n_positions"}.get(name, "max_position_embeddings"): length}
    made = {}
    for kind in ("ours", "torch", "none"):
        rates = {} if kind == "none" else {key: RATE for key in fields if "drop" in key}
        config = transformers.CONFIG_MAPPING[fields["model_type"]](**{**fields, **rates})
        made[kind] = getattr(transformers, f"AutoModelFor{CLASSES[task]}").from_config(config).train()
        made[kind].load_state_dict(made["ours"].state_dict())
    TokenDropout(made["ours"])
    return made


def step(model: nn.Module, head: LMHead | MLMHead, batch: dict[str, torch.Tensor]) -> float:
    """CPU-seconds of a forward and a backward pass."""
    begin = time.process_time()
    if dropout := TokenDropout.from_model(model):
        dropout.begin(batch)
    sums = masked_loss(head, batch) if isinstance(head, MLMHead) else causal_loss(model, head, batch)
    sums.total.backward()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 512])
    args = parser.parse_args()
    for name, task in (("gpt2", "clm"), ("bert", "mlm")):
        for length in args.lengths:
            models = networks(name, task, length)
            heads = {kind: MLMHead(model) if task == "mlm" else LMHead.from_model(model)
                     for kind, model in models.items()}
            ids = torch.randint(5, 30_000, (BATCH_SIZE, length))
            seeds = torch.from_numpy(token_seeds(1, 0, np.arange(BATCH_SIZE)[:, None], np.arange(length)))
            labels = torch.where(torch.rand(ids.shape) < 0.15, ids, -100) if task == "mlm" else ids
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels,
                     "token_seeds": seeds.long()}
            times = {kind: [] for kind in models}
            for number in range(args.rounds + 1):
                for kind, model in models.items():
                    seconds = step(model, heads[kind], copy.copy(batch))
                    times[kind] += [seconds] if number else []
            ours, theirs, none = (statistics.median(times[kind]) for kind in ("ours", "torch", "none"))
            print(f"{name}, {BATCH_SIZE} x {length} tokens: ours / torch's {ours / theirs:.2f}; without dropout "
                  f"{none / theirs:.2f}; CPU-seconds {ours:.2f}, {theirs:.2f}, {none:.2f}", flush=True)


if __name__ == "__main__":
    main()
