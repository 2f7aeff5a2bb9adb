"""Run a causal LM without its output head, so that the head only runs on positions with a target."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmmods.core.console import say
from lmmods.core.experts import Mixture
from lmmods.torch_engine.compat.peft import trained_rows
from lmmods.torch_engine.compat.torch import has_forward_hooks, is_plain
from lmmods.torch_engine.nn.experts import add_load, router_probabilities
from lmmods.torch_engine.nn.loss import (
    IGNORED,
    LossSums,
    shift_labels,
    shift_weights,
    token_log_probs,
    token_loss,
)


class LMHead:
    """Output layer of a causal LM, with its architecture's scale and soft cap of the logits.

    Args:
        model: Any causal LM of transformers, with or without PEFT's wrapper.
        plain: Apply the head to all positions, and compute the gradient by autograd.
    """

    def __init__(self, model: nn.Module, plain: bool = False):
        self.plain = plain
        config = model.config.get_text_config()
        self.layer = model.get_output_embeddings()
        self.vocab_size = config.vocab_size
        self._tokens: Tensor | None = None  # tokens of `trained_rows`, on the device
        # Field names of cohere, granite and gemma configurations.
        self.scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        self.softcap = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] of hidden states [N, H]."""
        logits = self._product(hidden)
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def _product(self, hidden: Tensor) -> Tensor:
        """Return the layer's output, with trained token rows computed separately."""
        trained = trained_rows(self.layer)
        if trained is None:
            return self.layer(hidden)
        # PEFT would write the rows into a copy of the matrix, and autograd would compute the copy's full gradient.
        layer, tokens, rows = trained
        if self.layer.token_adapter.disable_adapters:  # base model only
            return layer(hidden)
        # Once per device: copying a Python list to a GPU synchronises, and the head runs once per chunk.
        if self._tokens is None or self._tokens.device != hidden.device:
            self._tokens = torch.tensor(tokens, device=hidden.device)
        # [N, H] -> [N, V], with the columns of the K trained tokens replaced by [N, K]: only K rows receive a gradient.
        return layer(hidden).index_copy(-1, self._tokens, F.linear(hidden, rows.to(layer.weight.dtype)))

    @property
    def linear(self) -> nn.Linear | None:
        """The output layer if the head is only this matrix with scale and soft cap, otherwise None."""
        return None if self.unsupported_reason() else self.layer

    def unsupported_reason(self) -> str | None:
        """Return why autograd must differentiate the head, which is slower; None if it need not."""
        layer = self.layer
        if type(layer) is not nn.Linear:
            return f"its layer is a {type(layer).__name__}"
        if layer.bias is not None:
            return "it has a bias"
        if not is_plain(layer.weight.data):
            return "its weights are sharded"
        return "a strategy has added hooks to it" if has_forward_hooks(layer) else None

    def params(self) -> list[Tensor]:
        """Return the head's trainable parameters."""
        return [p for p in self.layer.parameters() if p.requires_grad]

    @classmethod
    def from_model(cls, model: nn.Module, plain: bool = False) -> "LMHead | None":
        """Return the head of `model`, or None if it transforms its logits in an unsupported way; report slow cases."""
        if model.get_output_embeddings() is None:
            return None
        head, name = cls(model, plain), model.config.get_text_config().model_type
        if not head._matches(model):
            say(f"Output head: {name} transforms its logits in an unsupported way. Computing full logits takes more "
                "time and memory.")
            return None
        if not plain and (reason := head.unsupported_reason()):
            say(f"Output head: autograd differentiates {name}'s head, as {reason}. This is slower.")
        return head

    def _matches(self, model: nn.Module) -> bool:
        """True if this head reproduces the model's own logits, checked on a few tokens."""
        # Distinct tokens, [1, 8]. Both logits are computed from the same hidden states, so only the head can differ.
        ids = torch.arange(8, device=self.layer.weight.device).unsqueeze(0) % self.vocab_size
        with torch.no_grad(), _capture(self.layer, keep=True) as captured:
            logits = model(input_ids=ids, use_cache=False).logits  # [1, 8, V]
            head_logits = self(captured[0])
        # Relative to the largest logit, which determines the absolute rounding error of all logits.
        return torch.allclose(head_logits.float(), logits.float(), rtol=1e-3, atol=1e-3 * logits.abs().max().item())


class Tempered:
    """An output head whose logits are divided by a temperature.

    Args:
        head: As in `token_loss`.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], temperature: float) -> None:
        self._head, self._temperature = head, temperature
        # A soft cap comes before the temperature, which `_LinearHead` does not support.
        self.linear = None if getattr(head, "softcap", None) is not None else getattr(head, "linear", None)
        self.scale, self.softcap = getattr(head, "scale", 1.0) / temperature, None

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._head(hidden) / self._temperature


def causal_loss(model: nn.Module, head: LMHead | None, batch: dict[str, Tensor], count_correct: bool = False,
                mixture: Mixture | None = None, balance_loss: float = 0.0, device: torch.device | None = None,
                loss: Callable[..., LossSums] = token_loss) -> LossSums:
    """Return the summed next-token loss of a batch.

    Args:
        head: The model's head, or None to use the model's own logits [B, T, V].
        batch: `input_ids`, `labels` [B, T]; `attention_mask` or, packed, `position_ids` restarting at 0; with weighted
            labels, `loss_weights` [B, T]. Alternatively the result of `ContextParallel.split`. A model's attribute
            `further_inputs` makes inputs from other columns.
        mixture: The experts whose load is measured, if any. `balance_loss` is the weight of the load-balancing loss.
        device: As in `token_loss`.
        loss: `token_loss`, or another function with its arguments.
    """
    targets, weights = _targets(batch)
    # `rest` is the head, its parameters, V and `plain`.
    hidden, *rest, outputs = run_without_head(model, head, batch, **({"output_router_logits": True} if mixture else {}))
    sums = loss(hidden, targets, *rest[:3], count_correct, rest[3], weights, device)
    if mixture is None:
        return sums
    # [B, T]. Padding is routed to experts like any token, but must not count as load.
    real = batch["segment_ids" if "segment_ids" in batch else "attention_mask"] > 0
    # [B, T]. Its row sums are the weights of the rows' load-balancing losses.
    target_weights = (targets != IGNORED) * (1.0 if weights is None else weights)
    return add_load(sums, router_probabilities(model, outputs), mixture, real, target_weights.sum(1), balance_loss)


def causal_logps(model: nn.Module, head: LMHead | None, batch: dict[str, Tensor], device: torch.device | None = None
                 ) -> tuple[Tensor, Tensor]:
    """Return the summed log-probability [B] in float32 of each row's target tokens, and their number [B].

    Args:
        batch: As in `causal_loss`.
        device: As in `token_loss`.
    """
    targets, _ = _targets(batch)
    hidden, *rest, _ = run_without_head(model, head, batch)
    is_target = targets != IGNORED
    # [B, T, H] -> [N, H]: target positions of all rows, in row-major order.
    logps = token_log_probs(hidden[is_target], targets[is_target], *rest, device)
    rows = is_target.nonzero()[:, 0]  # [N]
    return logps.new_zeros(len(targets)).index_add(0, rows, logps), is_target.sum(1)


def token_logps(model: nn.Module, head: LMHead | None, batch: dict[str, Tensor], temperature: float = 1.0,
                device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each position's target, 0 without target, and 1 for positions with a target.

    Both are [B, T] float32.

    Args:
        batch: As in `causal_loss`.
        temperature: Temperature of the distributions.
        device: As in `token_loss`.
    """
    targets, _ = _targets(batch)
    hidden, head, *rest, _ = run_without_head(model, head, batch)
    is_target = targets != IGNORED
    # [B, T, H] -> [N, H]: target positions of all rows, in row-major order.
    head = head if temperature == 1 else Tempered(head, temperature)
    logps = token_log_probs(hidden[is_target], targets[is_target], head, *rest, device)
    return logps.new_zeros(targets.shape).masked_scatter(is_target, logps), is_target.float()


def _targets(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the target of each position [B, T], and its weight."""
    if "targets" in batch:
        return batch["targets"], batch.get("target_weights")
    return shift_labels(batch["labels"]), shift_weights(batch.get("loss_weights"))


def run_without_head(model: nn.Module, head: LMHead | None, batch: dict[str, Tensor], **options: bool
                     ) -> tuple[Tensor, Callable[[Tensor], Tensor], list[Tensor], int, bool, Any]:
    """Return hidden states [B, T, H], the head's arguments of `token_loss`, and the model's outputs under `options`.

    Without a head: logits [B, T, V], and the identity as head.
    """
    inputs = network_inputs(model, batch) | options
    if head is None:
        outputs = model(**inputs)
        return outputs.logits, lambda x: x, [], outputs.logits.shape[-1], False, outputs
    # The layer runs on zero positions, so the model's own logits [B, T, V] are never computed.
    with _capture(head.layer) as captured:
        outputs = model(**inputs)
    return captured[0], head, head.params(), head.vocab_size, head.plain, outputs


def network_inputs(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of a model's forward pass without a cache.

    Args:
        batch: As in `causal_loss`, without labels.
    """
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    # With an all-ones mask, transformers would ignore the restarts in position_ids and let packed documents attend to
    # each other, so packed rows have no mask.
    inputs |= {"position_ids": batch["position_ids"]} if "position_ids" in batch else {
        "attention_mask": batch["attention_mask"]}
    # Under context parallelism the segments of the whole rows replace the mask; see `ContextParallel.attend`.
    if "row_segments" in batch:
        inputs["attention_mask"] = batch["row_segments"]
    if (further_inputs := getattr(model, "further_inputs", None)) is not None:
        inputs |= further_inputs(batch)
    return inputs


def choice_logits(model: nn.Module, head: LMHead | None, batch: dict[str, Tensor], choices: Tensor) -> Tensor:
    """Return the logits [B, K] in float32 of the tokens `choices` [K] after the last token of each row.

    Args:
        head: The model's head, or None to use the model's own logits [B, T, V].
        batch: `input_ids` and `attention_mask` [B, T], padded on the right.
    """
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")} | {"use_cache": False}
    last = batch["attention_mask"].sum(1) - 1  # [B], index of each row's last token
    rows = torch.arange(len(last), device=last.device)
    if head is None:
        return model(**inputs).logits[rows, last][:, choices].float()
    with _capture(head.layer) as captured:
        model(**inputs)
    # [B, T, H] -> [B, H] -> [B, V] -> [B, K]
    return head(captured[0][rows, last])[:, choices].float()


def keeps_packed_apart(model: nn.Module) -> bool:
    """True if documents packed into one row with restarting `position_ids` do not attend to each other.

    Checked on a few tokens, as it depends on the architecture: without `position_ids` (OPT) they attend.
    """
    device = model.get_input_embeddings().weight.device
    # Two documents of 6 tokens in one row. Only the first one differs between the two passes, so the logits of the
    # second are equal unless it attends to the first.
    ids = torch.arange(12, device=device).unsqueeze(0) % model.config.get_text_config().vocab_size
    changed = ids.clone()
    changed[:, :6] = ids[:, :6].flip(1)
    packed = {"position_ids": torch.arange(6, device=device).repeat(2).unsqueeze(0),
              "segment_ids": torch.tensor([1, 2], device=device).repeat_interleave(6).unsqueeze(0)}
    was_training = model.training
    model.eval()  # dropout would make the passes differ
    try:
        with torch.no_grad():
            first, second = (model(**network_inputs(model, {"input_ids": row, **packed})).logits[:, 6:].float()
                             for row in (ids, changed))
    except TypeError:  # the architecture does not support position_ids
        return False
    finally:
        model.train(was_training)
    return bool((first - second).abs().max() <= 1e-3 * first.abs().max())


@contextmanager
def _capture(layer: nn.Module, keep: bool = False) -> Iterator[list[Tensor]]:
    """Collect the inputs of `layer`; run the layer itself on zero positions unless `keep` is True."""
    captured: list[Tensor] = []

    def hook(_module, args):
        captured.append(args[0])
        # [B, T, H] -> [B, 0, H]: the layer is still called, as the model uses its output.
        return None if keep else (args[0][:, :0], *args[1:])

    handle = layer.register_forward_pre_hook(hook)
    try:
        yield captured
    finally:
        handle.remove()
