"""Images of a batch in the form that a network takes."""

import torch
from torch import Tensor, nn

from lmmods.core.image_models import COUNT, IMAGE_FAMILIES, image_token, is_of_language_model
from lmmods.core.labels import PER_ROW
from lmmods.torch_engine.compat.transformers import masks_of_documents


class ImageInputs:
    """Makes the inputs of a network besides those of text.

    Args:
        model: A network of a family of IMAGE_FAMILIES, with or without PEFT's wrapper.
    """

    def __init__(self, model: nn.Module) -> None:
        self._family, self._token = IMAGE_FAMILIES[model.config.model_type], image_token(model.config)
        self._model = model
        # Of networks whose positions in an image have several axes.
        self._rope_index = next((module.get_rope_index for module in model.modules()
                                 if hasattr(module, "get_rope_index")), None)

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return token types [B, T] and, if a batch of `ImageCollator` has images, their pixels and sizes.

        For packed rows also return the positions or masks with which each document is computed as a row of its own.
        """
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
        if "segment_ids" in batch and self._rope_index is not None:
            inputs["position_ids"] = self._packed_positions(batch, is_image, inputs.get("image_grid_thw"))
        if "segment_ids" in batch and self._family.in_both_directions:
            inputs["attention_mask"] = masks_of_documents(self._model, is_image, batch["segment_ids"])
        return inputs

    def _packed_positions(self, batch: dict[str, Tensor], is_image: Tensor, grids: Tensor | None) -> Tensor:
        """Return the positions [4, B, T] of tokens in their documents: their index, then those on the network's axes.

        Args:
            grids: [n, 3], the network's sizes of the images; None without images.
        """
        index = batch["position_ids"]
        if grids is None:
            return index.expand(4, -1, -1)
        # On the CPU, as the network's method reads number after number.
        ids, segments = batch["input_ids"].cpu(), batch["segment_ids"].cpu()
        # [B, D, T] -> [N, T]: each document as a row, whose other tokens are padding.
        documents = segments[:, None] == torch.arange(1, int(segments.max()) + 1)[:, None]
        rows, numbers = documents.any(2).nonzero(as_tuple=True)
        positions, _ = self._rope_index(ids[rows], is_image.long().cpu()[rows], image_grid_thw=grids.cpu(),
                                        attention_mask=documents[rows, numbers])
        # [3, N, T] -> [3, B, T]; padding has position 0.
        positions = torch.zeros(3, *ids.shape, dtype=positions.dtype).index_add(1, rows, positions)
        return torch.cat([index[None], positions.to(index)])


def use_all_parts(model: nn.Module) -> None:
    """Let every trained parameter outside the language model take part in each forward pass.

    A batch without images gives them a gradient of 0. Without one, optimisers would skip them depending on how a step
    is split into batches, and other processes would wait for this one's gradient.
    """
    others = [(module, name) for path, module in model.named_modules() if not is_of_language_model(path)
              for name, param in module.named_parameters(recurse=False) if param.requires_grad]

    def add_nothing(_module: nn.Module, _inputs: tuple, embeddings: Tensor) -> Tensor:
        # Looked up again, as FSDP replaces parameters. The sum over no elements is 0, whatever their values.
        return embeddings + torch.cat([getattr(module, name).flatten()[:0] for module, name in others]).sum()

    if others:
        model.get_input_embeddings().register_forward_hook(add_nothing)
