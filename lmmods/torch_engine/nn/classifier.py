"""Classification heads: the scores of rows, tokens or choices by the networks of transformers, and their losses."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmmods.data.base import DataModule
from lmmods.torch_engine.nn.loss import IGNORED, LossSums

# Ends of the names of transformers' classes whose head is new to most files, so that it trains in full.
NEW_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice")
NUM_PROBED = 8  # tokens of a row that shows how a network pools


def has_new_head(model: nn.Module) -> bool:
    """True if a network of transformers, not wrapped by PEFT, has a head that most files lack."""
    return type(model).__name__.endswith(NEW_HEADS)


def head_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules of a head: those outside of the base network, and the base's pooler.

    Args:
        model: A network of transformers with a head, not wrapped by PEFT.
    """
    base = model.base_model
    names = [name for name, child in model.named_children() if child is not base and next(child.parameters(), None)
             is not None]
    pooler = getattr(base, "pooler", None)
    return [*([f"{model.base_model_prefix}.pooler"] if isinstance(pooler, nn.Module) else []), *names]


class Classifier:
    """A network with a classification head, whose scores depend on no padding.

    Decoders are pooled at the last token that the attention mask marks as real. transformers looks for the last token
    that is not the padding id, which is an earlier one where a row ends in that token, as where padding is the end
    token.

    Args:
        model: A network for sequence classification, token classification or multiple choice, also wrapped by PEFT.
    """

    def __init__(self, model: nn.Module):
        # PEFT's wrappers may drop inputs; adapters are inside the network itself.
        self.network = model.get_base_model() if hasattr(model, "get_base_model") else model
        # Decoders would fill a cache of keys and values, which nothing reads.
        caches = "use_cache" in inspect.signature(type(self.network).forward).parameters
        self._options = {"use_cache": False} if caches else {}
        self._output = self._pooled_output()

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the scores in float32: [B, K] of rows, [B, T, K] of tokens, [B, C] of choices.

        Args:
            batch: `input_ids` and `attention_mask` [B, T] or, for choices, [B, C, T]; `token_type_ids` if the model has
                them.
        """
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
        if self._output is None:
            return self.network(**inputs, **self._options).logits.float()
        hidden = self._hidden(**inputs)  # [B, T, H]
        mask = batch["attention_mask"]
        last = mask.shape[1] - 1 - mask.flip(1).argmax(1)  # [B]
        return getattr(self.network, self._output)(hidden[torch.arange(len(last), device=last.device), last]).float()

    def _hidden(self, **inputs: Tensor) -> Tensor:
        return self.network.base_model(**inputs, **self._options).last_hidden_state

    @torch.no_grad()
    def _pooled_output(self) -> str | None:
        """Return the name of the layer that scores each token where the network then takes one of them, else None."""
        if not type(self.network).__name__.endswith("ForSequenceClassification"):
            return None
        base, config = self.network.base_model, self.network.config.get_text_config()
        # PEFT wraps a layer that trains in full, and keeps the original in it.
        layers = [(name, child) for name, child in self.network.named_children() if child is not base
                  and isinstance(getattr(child, "original_module", child), nn.Linear)]
        if len(layers) != 1:
            return None
        (name, layer), seen = layers[0], []
        handle = layer.register_forward_hook(lambda _, inputs, output: seen.append(output.ndim))
        try:
            ids = torch.arange(NUM_PROBED, device=next(layer.parameters()).device).unsqueeze(0) % config.vocab_size
            logits = self.network(input_ids=ids, attention_mask=torch.ones_like(ids), **self._options).logits
        finally:
            handle.remove()
        return name if logits.ndim == 2 and seen == [3] else None


# ---------------------------------------------------------------------------------------------------------------------
# Losses, as sums over a batch.

def label_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> LossSums:
    """Return the summed loss of labels, chosen by their type and shape.

    Integers are classes: cross-entropy, weighted by class. Floats like the logits are a yes or no for each class: the
    mean over classes of the binary cross-entropy. One float per row is a value: its squared error.

    Args:
        logits: [..., K] float32.
        labels: [...] int64, IGNORED where nothing is scored; or [B, K] or [B] float32, NaN in rows that do not count.
        weights: [K] float32, weight of each class; None for 1.
    """
    if not labels.is_floating_point():
        logits, labels = logits.flatten(0, -2), labels.flatten()
        scored = (labels != IGNORED).float()
        weight = scored if weights is None else scored * weights[labels.clamp(min=0)]
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")  # 0 where IGNORED
        return LossSums((losses * weight).sum(), weight.sum())
    scored = scored_values(labels)
    known = labels.nan_to_num()
    if labels.ndim == 1:
        losses = (logits.squeeze(-1) - known).square()
    else:
        losses = F.binary_cross_entropy_with_logits(logits, known, reduction="none")  # [B, K]
        losses = losses.mean(1) if weights is None else losses @ (weights / weights.sum())
    return LossSums((losses * scored).sum(), scored.sum().float())


def scored_values(labels: Tensor) -> Tensor:
    """Return which rows count, [B] bool, for labels [B] or [B, K] float32: those that are not NaN."""
    return ~labels.isnan() if labels.ndim == 1 else ~labels.isnan().any(1)


def reward_loss(scores: Tensor, margins: Tensor, center: float = 0.0) -> LossSums:
    """Return the summed loss of pairs, −log σ(s_w − s_l − margin) + center (s_w + s_l)² (Bradley & Terry 1952; the
    margin of Touvron et al. 2023; the centring of Eisenstein et al. 2023).

    Args:
        scores: [B, 2] float32, of the better and the worse answer.
        margins: [B] float32, NaN in rows that do not count.
    """
    better, worse = scores.unbind(1)
    scored = ~margins.isnan()
    losses = -F.logsigmoid(better - worse - margins.nan_to_num())
    if center:
        losses = losses + center * (better + worse).square()
    return LossSums((losses * scored).sum(), scored.sum().float())


def class_weights(datamodule: DataModule, setting: Any, device: torch.device) -> Tensor | None:
    """Return the weight of each class, [K] float32, that `model.class_weights` asks for; None for equal ones."""
    found = datamodule.class_weights(setting)
    return None if found is None else torch.from_numpy(found).float().to(device)
