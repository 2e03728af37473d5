"""A backbone and draft heads whose laws are tables, and the autoregressive law by direct products.

The law of a code is looked up under everything that its query sees: prompt and image tokens, each
with its place, and what each of these saw when its own keys and values were made. Nothing decodes
such a model right by luck: a token too many in view, a stale key or a wrong place changes the law.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_research.backbones.attention import RasterKV, RasterPass
from ssd_research.backbones.base import Backbone
from ssd_research.eagle import EagleDrafter
from ssd_research.grid import TokenGrid
from ssd_research.heads import Axis, DraftHeads
from ssd_research.sampling import Sampling

END_OF_ROW = 1000  # codes are fed as code + 1, prompt tokens as PROMPT + id
PROMPT = 2000
LEFT, ABOVE, HEAD, EAGLE = 11, 12, 13, 14  # salts that keep the tables apart


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Scramble 64-bit words (the finaliser of splitmix64)."""
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift(x, 31)


def hashed(*parts: Tensor | int) -> Tensor:
    """Return whole float64 numbers below 2^46 that name the tuple of whole numbers `parts`.

    A sum of a hundred of them is still exact, so that it does not depend on the order of terms.
    """
    x = torch.zeros((), dtype=torch.long)
    for part in parts:
        whole = part.long() if isinstance(part, Tensor) else part
        x = _mix(x * 31 + whole + 0x1E3779B97F4A7C15)
    return _shift(x, 18).double()


def table_row(size: int, *key: Tensor | int) -> Tensor:
    """Return the logits [..., size] of a law that is uniform on the simplex, looked up under `key`.

    The logarithms of independent exponential variables, which normalise to Dirichlet(1, ..., 1).
    """
    spread = [part[..., None] if isinstance(part, Tensor) else part for part in key]
    u = (hashed(*spread, torch.arange(size)) + 0.5) * 2.0**-46
    return (-u.log()).log()


class TableBackbone(Backbone):
    """A two-layer "transformer" whose attention sums hashes of what it sees, all exact in float64.

    h_pre is [name of all in view, slot it predicts, token in view at each slot of the image (0 for
    none)]. Logits are those of the left and upper neighbours' tables, as far as they are in view,
    plus `surprise` times those of the whole view's; without neighbours the law is arbitrary.
    Prompts are numbers in words, "3" or "1 2"; the unconditional prompt is "0".
    """

    name = "table"
    device = torch.device("cpu")
    dtype = torch.float64
    fingerprint = "table"
    defaults = Sampling(guidance=1.0)
    image_size = (4, 4)

    def __init__(
        self,
        grid: TokenGrid,
        codes: int,
        *,
        seed: int = 0,
        neighbours: bool = False,
        surprise: float = 1.0,
    ) -> None:
        self.grid, self.codebook_size, self.seed = grid, codes, seed
        self.neighbours, self.surprise = neighbours, surprise
        self.hidden_size = 2 + grid.slots

    def prompt_ids(self, text: str) -> list[int]:
        """Return the numbers in `text`."""
        return [PROMPT + int(word) for word in text.split()]

    def unconditional_ids(self, ids: list[int]) -> list[int]:
        """Return the prompt "0"."""
        return [PROMPT]

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Accept every prompt."""

    def decode_pixels(self, codes: Tensor) -> Tensor:
        raise NotImplementedError

    def embed(self, codes: Tensor) -> Tensor:
        """Return [code + 1, 0 ...]."""
        return self._embedded(codes + 1)

    def end_of_row_embedding(self) -> Tensor:
        return self._embedded(torch.full((1, 1), END_OF_ROW))

    @property
    def codebook(self) -> Tensor:
        """Return a codebook on a line: codes are as near as their numbers."""
        return torch.arange(self.codebook_size, dtype=self.dtype)[:, None]

    def pad_right(self, ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([len(one) for one in ids])
        width = int(lengths.max())
        padded = torch.tensor([[*one, *[PROMPT] * (width - len(one))] for one in ids])
        return self._embedded(padded), lengths

    def _embedded(self, tokens: Tensor) -> Tensor:
        e = torch.zeros(*tokens.shape, self.hidden_size, dtype=self.dtype)
        e[..., 0] = tokens
        return e

    def new_cache(self, streams: int, capacity: int) -> RasterKV:
        """Allocate two layers, wide enough for what `run` says about a token."""
        return RasterKV(
            2,
            streams=streams,
            heads=1,
            capacity=capacity,
            width=2 + capacity,
            dtype=self.dtype,
            device=self.device,
        )

    def run(self, embeds: Tensor, raster: RasterPass | None) -> Tensor:
        """Look twice at all that is in view: at the tokens, then at what those tokens saw."""
        tokens = embeds[..., 0]
        places = torch.arange(tokens.shape[1])[None] if raster is None else raster.places
        places = places.expand_as(tokens)
        # Room for the whole sequence, whether or not a cache holds it.
        room = tokens.shape[1] + self.grid.slots if raster is None else raster.kv.capacity
        prompt = tokens >= PROMPT
        value = torch.zeros(*tokens.shape, 2 + room, dtype=self.dtype)
        value[..., 0] = hashed(self.seed, tokens, places)
        value[..., 1] = prompt
        value.scatter_(2, 2 + places[..., None], torch.where(prompt, 0, tokens)[..., None])
        seen = self._look(0, value, raster)
        length = seen[..., 1].long()
        image = (length[..., None] + torch.arange(self.grid.slots)).clamp_max(room - 1)
        h = torch.zeros(*tokens.shape, self.hidden_size, dtype=self.dtype)
        h[..., 1] = places - length + 1
        h[..., 2:] = seen.gather(2, 2 + image)
        value[..., 0] = hashed(seen[..., 0], places)
        h[..., 0] = self._look(1, value, raster)[..., 0]
        return h

    def _look(self, layer: int, value: Tensor, raster: RasterPass | None) -> Tensor:
        """Return the sum of the values in view of each token."""
        if raster is None:
            return value.cumsum(1)
        _, values = raster.write(layer, value[:, None], value[:, None])
        if raster.mask is None:
            return values[:, 0].sum(1, keepdim=True).expand_as(value)
        return raster.mask[:, 0].to(self.dtype) @ values[:, 0]

    def logits(self, h_pre: Tensor, guidance: float) -> Tensor:
        """Look the law up; the two streams differ by their prompts."""
        name, slot, tokens = h_pre[..., 0], h_pre[..., 1].long(), h_pre[..., 2:]
        size = self.codebook_size
        logits = self.surprise * table_row(size, name, slot)
        if self.neighbours:
            x = slot % self.grid.row_len
            for salt, back, there in (
                (LEFT, slot - 1, x > 0),
                (ABOVE, slot - self.grid.row_len, slot >= self.grid.row_len),
            ):
                back = back.clamp(0, self.grid.slots - 1)
                token = tokens.gather(-1, back[..., None])[..., 0] * there
                table = table_row(size, self.seed, salt, token)
                logits = logits + torch.where((token > 0)[..., None], table, 0)
        if guidance == 1:
            return logits
        cond, uncond = logits.chunk(2)
        return uncond + guidance * (cond - uncond)


class TableHeads(DraftHeads):
    """Draft heads that know the neighbours' tables where these are in view, and nothing else.

    The rest of a draft is a table of its own, as arbitrary as the backbone's.
    """

    def __init__(self, backbone: TableBackbone, *, horizontal: int = 5, vertical: int = 3) -> None:
        super().__init__(1, horizontal=horizontal, vertical=vertical)
        self.backbone = backbone

    def predict(self, axis: Axis, offset: int, h: Tensor, e: Tensor) -> Tensor:
        """Return the state that `offset` columns or rows on would have, but for what lies between.

        `h` predicted a code, `e` is that code.
        """
        row = self.backbone.grid.row_len
        slot = h[..., 1:2].long().clamp(0, self.backbone.grid.slots - 1)
        step = offset * (row if axis == "vertical" else 1)
        drafted = h.clone()
        drafted[..., 0] = hashed(HEAD, h[..., 0], e[..., 0], step, axis == "vertical")
        drafted[..., 1] = h[..., 1] + step
        drafted.scatter_(-1, 2 + slot, e[..., :1])
        return drafted


class TableDrafter(EagleDrafter):
    """An EAGLE drafter of one "layer": its states name all the pairs (h, e) that are in view."""

    def __init__(self, backbone: TableBackbone) -> None:
        super().__init__(2, heads=1, kv_heads=1, intermediate_size=2)
        self.backbone = backbone

    def new_cache(self, streams: int, capacity: int) -> RasterKV:
        return RasterKV(
            1,
            streams=streams,
            heads=1,
            capacity=capacity,
            width=1,
            dtype=self.backbone.dtype,
            device=self.backbone.device,
        )

    def forward(
        self, h: Tensor, e: Tensor, places: Tensor, raster: RasterPass | None = None
    ) -> Tensor:
        """Return the states that follow the codes of `e`, which the states `h` predicted."""
        grid = self.backbone.grid
        pair = hashed(EAGLE, h[..., 0], e[..., 0], places)[:, None, :, None]
        _, seen = raster.write(0, pair, pair)
        mask = torch.ones(1, 1, 1, seen.shape[2]) if raster.mask is None else raster.mask
        drafted = h.clone()
        drafted[..., 0] = (mask[:, 0].to(h.dtype) @ seen[:, 0])[..., 0]
        slot = h[..., 1:2].long().clamp(0, grid.slots - 1)
        drafted.scatter_(-1, 2 + slot, e[..., :1])
        drafted[..., 1:2] = slot + 1 + grid.ends_row(slot + 1)
        return drafted


def images(grid: TokenGrid, codes: int) -> Tensor:
    """Return every image [codes ** size, size], in the order of their numbers in base `codes`."""
    return torch.tensor(list(itertools.product(range(codes), repeat=grid.size)))


def ar_law(backbone: TableBackbone, prompt: str, sampling: Sampling) -> Tensor:
    """Return the probability of every image, the product of its codes' conditional probabilities.

    One plain causal pass over all images: no decoder, no cache, no state, no shared filters.
    """
    codes = images(backbone.grid, backbone.codebook_size)
    prompts = [prompt] * len(codes)
    logits = backbone.logits(backbone.hidden_states(prompts, codes), 1)
    if sampling.guidance != 1:
        drop = torch.ones(len(codes), dtype=torch.bool)
        without = backbone.logits(backbone.hidden_states(prompts, codes, unconditional=drop), 1)
        logits = without + sampling.guidance * (logits - without)
    weight = (logits / sampling.temperature).exp()
    if sampling.top_k is not None:
        weight = weight * (
            weight >= weight.sort(-1, descending=True)[0][..., sampling.top_k - 1, None]
        )
    p = weight / weight.sum(-1, keepdim=True)
    if sampling.top_p is not None:
        # A code stays while all codes likelier than it leave some of top_p to be filled.
        likelier = (p[..., None, :] > p[..., None]).double() @ p[..., None]
        p = p * (likelier[..., 0] < sampling.top_p)
        p = p / p.sum(-1, keepdim=True)
    return p.gather(-1, codes[..., None])[..., 0].prod(-1)
