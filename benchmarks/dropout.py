"""Compare the cost of dropout by token with torch's dropout: CPU steps with a rate of 0.1, on the same rows.

    python benchmarks/dropout.py [--rounds 7] [--lengths 256 512]

Models with the same weights step in turn, forward and backward: one with `TokenDropout`, one with transformers' dropout
and one without dropout. Ratios compare median CPU times.
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


def make_models(name: str, task: str, length: int) -> dict[str, nn.Module]:
    """Return models with the same weights and our dropout, torch's dropout, or none."""
    fields = {**CONFIGS[name], {"gpt2": "n_positions"}.get(name, "max_position_embeddings"): length}
    models = {}
    for dropout in ("ours", "torch", "none"):
        rates = {} if dropout == "none" else {key: RATE for key in fields if "drop" in key}
        config = transformers.CONFIG_MAPPING[fields["model_type"]](**{**fields, **rates})
        models[dropout] = getattr(transformers, f"AutoModelFor{CLASSES[task]}").from_config(config).train()
        models[dropout].load_state_dict(models["ours"].state_dict())
    TokenDropout(models["ours"])
    return models


def time_step(model: nn.Module, head: LMHead | MLMHead, batch: dict[str, torch.Tensor]) -> float:
    """Return the CPU-seconds of a forward and a backward pass."""
    start = time.process_time()
    if dropout := TokenDropout.from_model(model):
        dropout.begin(batch)
    sums = masked_loss(head, batch) if isinstance(head, MLMHead) else causal_loss(model, head, batch)
    sums.total.backward()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 512])
    args = parser.parse_args()
    for name, task in (("gpt2", "clm"), ("bert", "mlm")):
        for length in args.lengths:
            models = make_models(name, task, length)
            heads = {dropout: MLMHead(model) if task == "mlm" else LMHead.from_model(model)
                     for dropout, model in models.items()}
            ids = torch.randint(5, 30_000, (BATCH_SIZE, length))
            seeds = torch.from_numpy(token_seeds(1, 0, np.arange(BATCH_SIZE)[:, None], np.arange(length)))
            labels = torch.where(torch.rand(ids.shape) < 0.15, ids, -100) if task == "mlm" else ids
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels,
                     "token_seeds": seeds.long()}
            times = {dropout: [] for dropout in models}
            for round_index in range(args.rounds + 1):
                for dropout, model in models.items():
                    seconds = time_step(model, heads[dropout], copy.copy(batch))
                    times[dropout] += [seconds] if round_index else []
            ours, peer, none = (statistics.median(times[dropout]) for dropout in ("ours", "torch", "none"))
            print(f"{name}, {BATCH_SIZE} x {length} tokens: ours / torch's {ours / peer:.2f}; without dropout "
                  f"{none / peer:.2f}; CPU-seconds {ours:.2f}, {peer:.2f}, {none:.2f}", flush=True)


if __name__ == "__main__":
    main()
