"""Classification heads of transformers' networks: scores of rows, tokens or choices, and their losses."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmmods.data.base import DataModule
from lmmods.torch_engine.nn.loss import IGNORED, LossSums

# Suffixes of transformers' classes whose head most checkpoints lack, so that it is initialised and fully trained.
NEW_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice")
NUM_PROBED = 8  # number of tokens of the row with which a network's pooling is detected


def has_new_head(model: nn.Module) -> bool:
    """True if a network of transformers, not wrapped by PEFT, has a head that most checkpoints lack."""
    return type(model).__name__.endswith(NEW_HEADS)


def head_modules(model: nn.Module) -> list[str]:
    """Return the names of a head's modules: the modules outside the base network, and the base's pooler.

    Args:
        model: A network of transformers with a head, not wrapped by PEFT.
    """
    base = model.base_model
    names = [name for name, child in model.named_children() if child is not base and next(child.parameters(), None)
             is not None]
    pooler = getattr(base, "pooler", None)
    return [*([f"{model.base_model_prefix}.pooler"] if isinstance(pooler, nn.Module) else []), *names]


class Classifier:
    """A network with a classification head whose scores do not depend on padding.

    Decoders are pooled at the last real token of the attention mask. transformers uses the last token that differs
    from the padding id, which is wrong if a row ends in that token, for example if it is also the end token.

    Args:
        model: A network for sequence classification, token classification or multiple choice, with or without PEFT.
    """

    def __init__(self, model: nn.Module):
        # PEFT's wrappers may drop inputs; their adapters are inside the network.
        self.network = model.get_base_model() if hasattr(model, "get_base_model") else model
        # By default decoders fill a cache of keys and values, which is not used here.
        has_cache = "use_cache" in inspect.signature(type(self.network).forward).parameters
        self._options = {"use_cache": False} if has_cache else {}
        self._output = self._find_pooled_output()

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the scores in float32: [B, K] for rows, [B, T, K] for tokens, [B, C] for choices.

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
    def _find_pooled_output(self) -> str | None:
        """Return the name of the layer that scores every token before the network selects one, or None."""
        if not type(self.network).__name__.endswith("ForSequenceClassification"):
            return None
        base, config = self.network.base_model, self.network.config.get_text_config()
        # PEFT wraps a fully trained layer, and keeps the original in it.
        layers = [(name, child) for name, child in self.network.named_children() if child is not base
                  and isinstance(getattr(child, "original_module", child), nn.Linear)]
        if len(layers) != 1:
            return None
        (name, layer), output_ndims = layers[0], []
        handle = layer.register_forward_hook(lambda _, inputs, output: output_ndims.append(output.ndim))
        try:
            ids = torch.arange(NUM_PROBED, device=next(layer.parameters()).device).unsqueeze(0) % config.vocab_size
            logits = self.network(input_ids=ids, attention_mask=torch.ones_like(ids), **self._options).logits
        finally:
            handle.remove()
        return name if logits.ndim == 2 and output_ndims == [3] else None


# ---------------------------------------------------------------------------------------------------------------------
# Losses, as sums over a batch.

def label_loss(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> LossSums:
    """Return the summed loss of labels; their type and shape determine the loss.

    Integers are classes: cross-entropy, weighted by class. Floats in the logits' shape are 0 or 1 for each class:
    binary cross-entropy, averaged over classes. One float per row is a value: squared error.

    Args:
        logits: [..., K] float32.
        labels: [...] int64, IGNORED without target; or [B, K] or [B] float32, NaN in rows without target.
        weights: [K] float32, weight of each class. Default: 1.
    """
    if not labels.is_floating_point():
        logits, labels = logits.flatten(0, -2), labels.flatten()
        is_target = (labels != IGNORED).float()
        weight = is_target if weights is None else is_target * weights[labels.clamp(min=0)]
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")  # 0 where IGNORED
        return LossSums((losses * weight).sum(), weight.sum())
    is_target = has_values(labels)
    values = labels.nan_to_num()
    if labels.ndim == 1:
        losses = (logits.squeeze(-1) - values).square()
    else:
        losses = F.binary_cross_entropy_with_logits(logits, values, reduction="none")  # [B, K]
        losses = losses.mean(1) if weights is None else losses @ (weights / weights.sum())
    return LossSums((losses * is_target).sum(), is_target.sum().float())


def has_values(labels: Tensor) -> Tensor:
    """Return which rows of labels [B] or [B, K] float32 are not NaN, [B] bool."""
    return ~labels.isnan() if labels.ndim == 1 else ~labels.isnan().any(1)


def reward_loss(scores: Tensor, margins: Tensor, center: float = 0.0) -> LossSums:
    """Return the summed loss of pairs, −log σ(s_w − s_l − margin) + center (s_w + s_l)² (Bradley & Terry 1952; the
    margin of Touvron et al. 2023; the centring of Eisenstein et al. 2023).

    Args:
        scores: [B, 2] float32, scores of the better and the worse answer.
        margins: [B] float32, NaN in rows without target.
    """
    better, worse = scores.unbind(1)
    is_target = ~margins.isnan()
    losses = -F.logsigmoid(better - worse - margins.nan_to_num())
    if center:
        losses = losses + center * (better + worse).square()
    return LossSums((losses * is_target).sum(), is_target.sum().float())


def class_weights(datamodule: DataModule, setting: Any, device: torch.device) -> Tensor | None:
    """Return the weight of each class, [K] float32, from the setting `model.class_weights`; None for equal weights."""
    weights = datamodule.class_weights(setting)
    return None if weights is None else torch.from_numpy(weights).float().to(device)
