"""Backbones whose image codes are ids of the text vocabulary, with a forced end-of-row token."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ssd_research.backbones.base import Backbone
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling


class VocabularyBackbone(Backbone):
    """A stack that reads and writes one vocabulary; `code_ids[k]` is the id of code k.

    Only the K rows of `lm_head` that belong to codes are kept, in code order: its logits are the
    full head's, gathered, at an eighth of the memory traffic or less.
    """

    def __init__(
        self,
        decoder: nn.Module,
        lm_head: nn.Linear,
        *,
        code_ids: Sequence[int],
        end_of_row_id: int,
        grid: TokenGrid,
        image_size: tuple[int, int],
        name: str,
        defaults: Sampling,
    ) -> None:
        super().__init__(decoder)
        self.name, self.defaults, self.grid, self.image_size = name, defaults, grid, image_size
        words = decoder.get_input_embeddings()
        ids = torch.tensor(code_ids)
        self.code_ids, self.end_of_row_id = ids, end_of_row_id
        self.hidden_size, self.codebook_size = words.weight.shape[1], len(ids)
        self.code_embeddings = rows(words.weight.detach(), ids)
        self.code_embedders = (words,)
        self.image_head = nn.Linear(self.hidden_size, len(ids), bias=False, device="meta")
        self.left_out_head_parameters = lm_head.weight.numel() - self.image_head.weight.numel()
        kept = rows(lm_head.weight.detach(), ids).clone()
        self.image_head.weight = nn.Parameter(kept, requires_grad=False)

    def end_of_row_embedding(self) -> Float[Tensor, "1 1 D"]:
        """Return the embedding of the forced token that ends every row."""
        return self.decoder.get_input_embeddings().weight[self.end_of_row_id][None, None]


def rows(table: Float[Tensor, "V D"], ids: Int[Tensor, " K"]) -> Float[Tensor, "K D"]:
    """Return the rows `ids` of a table: a view where they are consecutive, else a copy."""
    first, count = int(ids[0]), len(ids)
    if bool((ids == torch.arange(first, first + count)).all()):
        return table[first : first + count]
    return table[ids.to(table.device)]
