"""The sizes of a backbone that its compute and memory follow from (paper Table 12)."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Dimensions:
    """Sizes of a loaded backbone, read off its own modules.

    `layer_parameters` are those of all `layers` together, without embeddings and the final norm.
    `head_parameters` are those of the model's own head for images, over its whole vocabulary where
    codes are words; `code_head_parameters` the part of it that is kept and evaluated here, over the
    codes alone. `attention_width` is query heads x head width, `kv_width` KV heads x head width.
    `image_tokens` counts the codes and end-of-row tokens of an image, `number_bytes` one number of
    keys and values, `weight_bytes` all weights that are held, image decoder included.
    """

    layers: int
    layer_parameters: int
    head_parameters: int
    code_head_parameters: int
    attention_width: int
    kv_width: int
    image_tokens: int
    number_bytes: int
    weight_bytes: int


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory behind tensors; what views and ties share counts once."""
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())
