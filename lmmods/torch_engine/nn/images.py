"""Images of a batch in the form that a network takes."""

import torch
from torch import Tensor, nn

from lmmods.core.image_models import COUNT, IMAGE_FAMILIES, image_token
from lmmods.core.labels import PER_ROW


class ImageInputs:
    """Makes the inputs of a network besides those of text.

    Args:
        model: A network of a family of IMAGE_FAMILIES, with or without PEFT's wrapper.
    """

    def __init__(self, model: nn.Module) -> None:
        self._family, self._token = IMAGE_FAMILIES[model.config.model_type], image_token(model.config)

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return token types [B, T] and, if a batch of `ImageCollator` has images, their pixels and sizes."""
        is_image = batch["input_ids"] == self._token
        inputs = {} if self._family.token_types is None else {self._family.token_types: is_image.long()}
        columns = [name for name in batch if name.startswith(PER_ROW) and not name.startswith(COUNT)]
        for column in columns if columns and is_image.any() else ():
            name, values = column.removeprefix(PER_ROW), batch[column]
            if name not in self._family.whole_rows:
                # [B, max n, ...] -> [n, ...], those of all rows in order
                positions = torch.arange(values.shape[1], device=values.device)
                values = values[positions < batch[COUNT + name][:, None]]
            inputs[name] = values
        return inputs
