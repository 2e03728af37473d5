"""A backbone and distilled images whose content is known."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ssd_research.backbones.base import Backbone
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling


class AnalyticBackbone(Backbone):
    """h_pre(y, x) = [y, x, unconditional, last code seen, 1, 0 ...]; predicts code y * cols + x.

    The final norm doubles: what is taken for h_post but is not stands for another code.
    """

    name = "analytic"
    device = torch.device("cpu")
    dtype = torch.float32
    fingerprint = ""
    defaults = Sampling(guidance=1.0)
    image_size = (4, 4)

    def __init__(
        self,
        grid: TokenGrid = TokenGrid(4, 5),  # noqa: B008
        hidden_size: int = 8,
        fingerprint: str = "analytic-4x5",
    ) -> None:
        self.grid, self.hidden_size, self.fingerprint = grid, hidden_size, fingerprint
        self.codebook_size = grid.size

    def embed(self, codes: Tensor) -> Tensor:
        """Return [code, 1, 0 ...]."""
        e = torch.zeros(*codes.shape, self.hidden_size)
        e[..., 0], e[..., 1] = codes, 1
        return e

    @property
    def code_embeddings(self) -> Tensor:
        """Return the embeddings of all codes."""
        return self.embed(torch.arange(self.codebook_size))

    def normalise(self, h_pre: Tensor) -> Tensor:
        """Double the states."""
        return 2 * h_pre

    def image_head(self, h_post: Tensor) -> Tensor:
        """Prefer the code y * cols + x of the state's own place."""
        place = (h_post[..., 0] * self.grid.cols + h_post[..., 1]) / 2
        return -(torch.arange(self.codebook_size) - place[..., None]).square()

    def hidden_states(
        self, prompts: Sequence[str], codes: Tensor, *, unconditional: Tensor | None = None
    ) -> Tensor:
        """Return the states described above."""
        h = torch.zeros(*codes.shape, self.hidden_size)
        place = torch.arange(self.grid.size)
        h[..., 0], h[..., 1] = place // self.grid.cols, place % self.grid.cols
        if unconditional is not None:
            h[..., 2] = unconditional[:, None]
        h[..., 3] = torch.cat([torch.full((len(codes), 1), -1), codes[:, :-1]], 1)
        h[..., 4] = 1
        return h

    def prompt_ids(self, text: str) -> list[int]:
        raise NotImplementedError

    def unconditional_ids(self, ids: list[int]) -> list[int]:
        raise NotImplementedError

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Accept every prompt."""

    def decode_pixels(self, codes: Tensor) -> Tensor:
        raise NotImplementedError


def distilled(folder: Path, *, images: int, size: int, codes: int, shards: int = 2) -> Path:
    """Write a finished distill run of random codes, two images per prompt."""
    rng = np.random.default_rng(0)
    (folder / "data").mkdir(parents=True)
    for n, part in enumerate(np.array_split(np.arange(images), shards)):
        rows = {
            "prompt_id": [f"p{i // 2}" for i in part],
            "prompt": [("a red circle", "two blue squares", "a ring")[i % 3] for i in part],
            "sample_key": [str(2**63 + int(i)) for i in part],
            "seed": [0] * len(part),
            "image_index": [int(i % 2) for i in part],
            "codes": pa.array(
                [rng.integers(codes, size=size).astype(np.int32) for _ in part],
                pa.list_(pa.int32()),
            ),
        }
        pq.write_table(pa.table(rows), folder / "data" / f"shard-{n:05d}.parquet")
    (folder / "DONE").touch()
    return folder
