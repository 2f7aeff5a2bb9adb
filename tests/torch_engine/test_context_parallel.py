"""Context parallelism: rows split along the sequence equal whole rows of transformers, for every supported family."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from lmmods.core.errors import UserError
from lmmods.torch_engine.nn import context_parallel
from lmmods.torch_engine.nn.context_parallel import FAMILIES, ContextParallel, check_network
from lmmods.torch_engine.nn.dropout import TokenDropout
from lmmods.torch_engine.nn.lm_head import LMHead, causal_logps, causal_loss
from lmmods.torch_engine.nn.loss import LossSums
from tests.closeness import assert_as_close
from tests.forks import together

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
         "attention_dropout": 0.0}
FAMILY_FIELDS = {"mistral": {"sliding_window": 4}, "smollm3": {"no_rope_layers": [1, 0]}, "phi3": {"sliding_window": 5},
                 "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
                 "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
                 "cohere2": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
                 "olmo3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
                 "starcoder2": {"sliding_window": 6, "residual_dropout": 0.0, "embedding_dropout": 0.0},
                 "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}}


def batches() -> dict[str, dict[str, torch.Tensor]]:
    """Return rows of 13 positions: packed documents, and rows padded on either side."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (2, 13), generator=generator)
    labels = ids.where(torch.rand(ids.shape, generator=generator) < 0.8, -100)
    weights = torch.rand(ids.shape, generator=generator)
    lengths = [[3, 7, 3], [6, 5, 0]]  # the second row ends in padding
    segments = torch.tensor([[1] * a + [2] * b + [3] * c + [0] * (13 - a - b - c) for a, b, c in lengths])
    positions = torch.tensor([[*range(a), *range(b), *range(13 - a - b)] for a, b, _ in lengths])
    starts = (positions == 0) | (segments == 0)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, 9:] = 0, 0
    return {"packed": {"input_ids": ids, "labels": labels.where(~starts, -100), "segment_ids": segments,
                       "position_ids": positions, "attention_mask": (segments > 0).long(), "loss_weights": weights},
            "padded": {"input_ids": ids, "labels": labels.where((mask > 0) & (mask.cumsum(1) > 1), -100),
                       "attention_mask": mask}}


def whole_loss(network: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    packed = "segment_ids" in batch
    inputs = {"position_ids": batch["position_ids"]} if packed else {"attention_mask": batch["attention_mask"]}
    logits = network(input_ids=batch["input_ids"], use_cache=False, **inputs).logits
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none")
    return (losses * batch["loss_weights"][:, 1:].flatten()).sum() if packed else losses.sum()


def compare_logps(network: torch.nn.Module, rows: ContextParallel, batch: dict[str, torch.Tensor]) -> None:
    """Check that split rows have the log-probabilities and gradients of whole rows."""
    results = []
    for part in (batch, rows.split(batch)):
        network.zero_grad()
        logps, _ = causal_logps(network, LMHead.from_model(network), part)
        if part is not batch:
            logps = rows.sum(logps)
        rows.divide(LossSums((logps / 10).exp().sum(), logps.new_tensor(2))).total.backward()
        weight = network.get_output_embeddings().weight.grad
        torch.distributed.all_reduce(weight)
        results.append((logps.detach(), weight.clone()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5 * results[0][1].abs().max().item())


def compare_families(*families: str) -> None:
    """Check losses and gradients of two processes that split their rows, with blocks of two positions."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    context_parallel.BLOCK = 2
    for family in families:
        config = AutoConfig.for_model(family, **SIZES, **FAMILY_FIELDS.get(family, {}), attn_implementation="sdpa")
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config)
        for parameter in network.parameters():  # biases, too
            torch.nn.init.normal_(parameter, std=0.2)
        TokenDropout(network)
        for batch_name, batch in batches().items():
            if batch_name == "padded" and family != "llama":  # all families share the mask function
                continue
            network.set_attn_implementation("sdpa")
            network.zero_grad()
            loss = whole_loss(network, batch)
            loss.backward()
            expected = {"loss": loss.detach()} | {name: p.grad.clone() for name, p in network.named_parameters()}
            rows = ContextParallel.over(network, mesh, 2)
            network.zero_grad()
            part = rows.split(batch)
            assert part["input_ids"].shape == (2, 8)
            loss = causal_loss(network, LMHead.from_model(network), part).total
            loss.backward()
            results = {"loss": loss.detach()} | {name: p.grad for name, p in network.named_parameters()}
            for name, value in results.items():
                torch.distributed.all_reduce(value)
                scale = expected[name].abs().max()
                assert scale > 0 and (value - expected[name]).abs().max() <= 1e-5 * scale, (family, batch_name, name)
        print(family, "agrees")
    compare_logps(network, rows, batch)
    torch.distributed.destroy_process_group()


class OneOfThree(ContextParallel):
    """One of three simulated processes; `known` has the keys and values [T, 2, ...] of all of them."""

    def __init__(self, rank: int, known: torch.Tensor):
        self.rank, self.size, self._last, self._known = rank, 3, (None, []), known
        self._device, self._one_document = None, False

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._known

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self.sums = x
        return x[: len(x) // self.size]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("block", [1, 3, 1024])
def test_attention_in_blocks_of_queries_equals_whole_attention(monkeypatch, block, window):
    monkeypatch.setattr(context_parallel, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 24, 4, generator=generator) for heads in (4, 2, 2, 4))
    segments = torch.tensor([[1] * 5 + [2] * 14 + [3] * 2 + [0] * 3, [0] * 4 + [1] * 20]).int()
    distance = torch.arange(24)[:, None] - torch.arange(24)
    allowed = (distance >= 0) & (distance < (window or 24)) & (segments[:, :, None] == segments[:, None])

    def attend_whole(*qkv: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the output and the gradients of queries, keys and values, [B, H, T, D] each."""
        qkv = [x.detach().requires_grad_() for x in qkv]
        output = F.scaled_dot_product_attention(*qkv, allowed[:, None], scale=0.3, enable_gqa=True)
        return dict(zip(("mixed", "q", "k", "v"), (output, *torch.autograd.grad(output, qkv, grad.to(output.dtype))),
                        strict=True))

    results, sums = {"mixed": torch.empty_like(q), "q": torch.empty_like(q)}, 0
    for rank in range(3):
        rows = OneOfThree(rank, torch.stack([k, v]).movedim(3, 0).detach())
        local = torch.tensor(sum(map(list, rows._local_chunks(24)), []))
        shards = [x[:, :, local].detach().requires_grad_() for x in (q, k, v)]
        output, _ = rows.attend(None, *shards, segments[:, None, None], scaling=0.3, sliding_window=window)
        output.backward(grad[:, :, local].transpose(1, 2))
        results["mixed"][:, :, local], results["q"][:, :, local] = output.detach().transpose(1, 2), shards[0].grad
        sums = sums + rows.sums
    results["k"], results["v"] = sums.movedim(0, 3)
    assert_as_close(results, attend_whole(q, k, v), attend_whole(q.double(), k.double(), v.double()))


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_type": "bert"}, "is not supported for bert"), ({"attn_pdrop": 0.1}, "attention dropout"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope type longrope"),
    ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope type dynamic")])
def test_unsupported_networks_are_rejected_by_name(changes, message):
    config = SimpleNamespace(**{"model_type": "llama", "rope_parameters": None} | changes)
    with pytest.raises(UserError, match=message):
        check_network(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config)), 2)


@pytest.mark.slow
def test_every_family_computes_split_rows_as_whole_rows():
    for output in together(list(FAMILIES), processes=2, program=compare_families):
        assert output.count("agrees") == len(FAMILIES)
