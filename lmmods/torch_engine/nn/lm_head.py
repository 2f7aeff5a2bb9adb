"""A causal LM split at its output head, so that the head is applied to labelled positions only."""

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
from lmmods.torch_engine.nn.experts import router_probabilities, with_load
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
        model: Any causal LM of transformers, also wrapped by PEFT.
        plain: Apply it to all positions, and leave the gradient to autograd.
    """

    def __init__(self, model: nn.Module, plain: bool = False):
        self.plain = plain
        config = model.config.get_text_config()
        self.layer = model.get_output_embeddings()
        self.vocab_size = config.vocab_size
        self._tokens: Tensor | None = None  # of `trained_rows`, on the device
        # Field names of cohere, granite and gemma configurations.
        self.scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        self.softcap = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, H]."""
        logits = self._product(hidden)
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def _product(self, hidden: Tensor) -> Tensor:
        """Output of the layer, with trained token rows computed apart."""
        found = trained_rows(self.layer)
        if found is None:
            return self.layer(hidden)
        # PEFT would write the rows into a copy of the matrix, and autograd then compute the copy's full gradient.
        layer, tokens, rows = found
        if self.layer.token_adapter.disable_adapters:  # base model only
            return layer(hidden)
        # Once per device: copying a Python list to a GPU synchronises, and the head runs once per chunk.
        if self._tokens is None or self._tokens.device != hidden.device:
            self._tokens = torch.tensor(tokens, device=hidden.device)
        # [N, H] -> [N, V], with the columns of the K trained tokens replaced by [N, K]: only K rows receive a gradient.
        return layer(hidden).index_copy(-1, self._tokens, F.linear(hidden, rows.to(layer.weight.dtype)))

    @property
    def linear(self) -> nn.Linear | None:
        """The output layer if the head is only this matrix with scale and soft cap, else None; see `obstacle`."""
        return None if self.obstacle() else self.layer

    def obstacle(self) -> str | None:
        """Return why the head must be left to autograd, which is slower; None if it need not."""
        layer = self.layer
        if type(layer) is not nn.Linear:
            return f"its layer is a {type(layer).__name__}"
        if layer.bias is not None:
            return "it has a bias"
        if not is_plain(layer.weight.data):
            return "its weights are sharded"
        return "hooks of a strategy run around it" if has_forward_hooks(layer) else None

    def params(self) -> list[Tensor]:
        """Return the head's trainable parameters."""
        return [p for p in self.layer.parameters() if p.requires_grad]

    @classmethod
    def from_model(cls, model: nn.Module, plain: bool = False) -> "LMHead | None":
        """Return the head of `model`, None if its logits are computed in an unknown way; reports slow cases."""
        if model.get_output_embeddings() is None:
            return None
        head, name = cls(model, plain), model.config.get_text_config().model_type
        if not head._matches(model):
            say(f"Output head: {name} does something to its logits that is not known here; its full logits are "
                "computed, which takes more time and memory.")
            return None
        if not plain and (obstacle := head.obstacle()):
            say(f"Output head: autograd differentiates that of {name}, as {obstacle}; a head without is faster.")
        return head

    def _matches(self, model: nn.Module) -> bool:
        """True if this head reproduces the model's own logits, checked on a few tokens."""
        # Distinct tokens, [1, 8]. Both logits come from the same hidden states, so only the head can make them differ.
        ids = torch.arange(8, device=self.layer.weight.device).unsqueeze(0) % self.vocab_size
        with torch.no_grad(), _capture(self.layer, keep=True) as captured:
            logits = model(input_ids=ids, use_cache=False).logits  # [1, 8, V]
            own = self(captured[0])
        # Relative to the largest logit, as logits near 0 have its absolute rounding error.
        return torch.allclose(own.float(), logits.float(), rtol=1e-3, atol=1e-3 * logits.abs().max().item())


class Tempered:
    """An output head whose logits are divided by a temperature.

    Args:
        head: As in `token_loss`.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], temperature: float) -> None:
        self._head, self._temperature = head, temperature
        # A soft cap comes before the temperature, which `_LinearHead` cannot do.
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
            labels, `loss_weights` [B, T]. Alternatively the result of `ContextParallel.cut`.
        mixture: The experts whose load is measured, if any; `balance_loss` is the weight of the load-balancing loss.
        device: As in `token_loss`.
        loss: `token_loss`, or another function with its arguments.
    """
    targets, weights = _targets(batch)
    # `rest` is head, its parameters, V and plain.
    hidden, *rest, outputs = run_without_head(model, head, batch, **({"output_router_logits": True} if mixture else {}))
    sums = loss(hidden, targets, *rest[:3], count_correct, rest[3], weights, device)
    if mixture is None:
        return sums
    # [B, T]. Padding is routed to experts like any token, but must not count as load.
    real = batch["segment_ids" if "segment_ids" in batch else "attention_mask"] > 0
    # [B, T]. Its row sums weight the rows' balance losses as their tokens weight the loss.
    counted = (targets != IGNORED) * (1.0 if weights is None else weights)
    return with_load(sums, router_probabilities(model, outputs), mixture, real, counted.sum(1), balance_loss)


def causal_logps(model: nn.Module, head: LMHead | None, batch: dict[str, Tensor], device: torch.device | None = None
                 ) -> tuple[Tensor, Tensor]:
    """Return the summed log-probability [B] in float32 of each row's labelled tokens, and their number [B].

    Args:
        batch: As in `causal_loss`.
        device: As in `token_loss`.
    """
    targets, _ = _targets(batch)
    hidden, *rest, _ = run_without_head(model, head, batch)
    scored = targets != IGNORED
    # [B, T, H] -> [N, H]: labelled positions of all rows, in row-major order.
    logps = token_log_probs(hidden[scored], targets[scored], *rest, device)
    rows = scored.nonzero()[:, 0]  # [N]
    return logps.new_zeros(len(targets)).index_add(0, rows, logps), scored.sum(1)


def token_logps(model: nn.Module, head: LMHead | None, batch: dict[str, Tensor], temperature: float = 1.0,
                device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each position's target, 0 where there is none, and 1 where there is one: [B, T]
    float32 each.

    Args:
        batch: As in `causal_loss`.
        temperature: Of the distributions.
        device: As in `token_loss`.
    """
    targets, _ = _targets(batch)
    hidden, head, *rest, _ = run_without_head(model, head, batch)
    scored = targets != IGNORED
    # [B, T, H] -> [N, H]: labelled positions of all rows, in row-major order.
    logps = token_log_probs(hidden[scored], targets[scored], head if temperature == 1 else Tempered(head, temperature),
                            *rest, device)
    return logps.new_zeros(targets.shape).masked_scatter(scored, logps), scored.float()


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
    inputs = {"input_ids": batch["input_ids"], "use_cache": False, **options}
    # With an all-ones mask, transformers would ignore the restarts in position_ids and let packed documents attend to
    # each other, so packed rows have no mask.
    inputs |= {"position_ids": batch["position_ids"]} if "position_ids" in batch else {
        "attention_mask": batch["attention_mask"]}
    # Under context parallelism the mask's place holds the segments of the whole rows, see `ContextParallel.attend`.
    if "row_segments" in batch:
        inputs["attention_mask"] = batch["row_segments"]
    if head is None:
        outputs = model(**inputs)
        return outputs.logits, lambda x: x, [], outputs.logits.shape[-1], False, outputs
    # The layer itself runs on zero positions: the model's own logits [B, T, V] are never computed.
    with _capture(head.layer) as captured:
        outputs = model(**inputs)
    return captured[0], head, head.params(), head.vocab_size, head.plain, outputs


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

    Checked on a few tokens, as it depends on the architecture: without `position_ids` (OPT) they do.
    """
    device = model.get_input_embeddings().weight.device
    # Two documents of 6 tokens in one row. Only the first one differs between the two passes, so the logits of the
    # second are equal unless it attends to the first.
    ids = torch.arange(12, device=device).unsqueeze(0) % model.config.get_text_config().vocab_size
    other = ids.clone()
    other[:, :6] = ids[:, :6].flip(1)
    positions = torch.arange(6, device=device).repeat(2).unsqueeze(0)
    was_training = model.training
    model.eval()  # dropout would make the passes differ
    try:
        with torch.no_grad():
            first, second = (model(input_ids=row, position_ids=positions, use_cache=False).logits[:, 6:].float()
                             for row in (ids, other))
    except TypeError:  # the architecture takes no position_ids
        return False
    finally:
        model.train(was_training)
    return bool((first - second).abs().max() <= 1e-3 * first.abs().max())


@contextmanager
def _capture(layer: nn.Module, keep: bool = False) -> Iterator[list[Tensor]]:
    """Collect the inputs of `layer`; unless `keep`, the layer itself is run on zero positions."""
    captured: list[Tensor] = []

    def hook(_module, args):
        captured.append(args[0])
        # [B, T, H] -> [B, 0, H]: the layer is still called, as the model goes on to use its output.
        return None if keep else (args[0][:, :0], *args[1:])

    handle = layer.register_forward_pre_hook(hook)
    try:
        yield captured
    finally:
        handle.remove()
