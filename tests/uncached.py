"""Backbones on any grid, and one image without a cache, for references of decoders with holes.

Keys that a decoder keeps are those its tokens made when they were fed. So each feeding of a token
is an entry of one growing sequence, with its place in the raster and a list of the entries that it
sees, and every law is recomputed from all of them by the untouched transformers model.
"""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn

from ssd_research.backbones.janus import JanusBackbone
from ssd_research.backbones.tiny import random_model
from ssd_research.decoders.noise import KeyedNoise
from ssd_research.grid import TokenGrid
from ssd_research.sampling import Sampling

PROMPTS = ["a red circle", "a large pink square left of a small black circle"]
SEED, KEYS = 11, [101, 202]
GRIDS = {
    "square": TokenGrid(5, 5),
    "wide": TokenGrid(3, 7),
    "tall": TokenGrid(7, 3),
    "one_row": TokenGrid(1, 5),
    "ends": TokenGrid(4, 5, end_of_row=True),
    "one_ending_row": TokenGrid(1, 4, end_of_row=True),
}


class Shaped(JanusBackbone):
    """Janus's classes on any grid, with end-of-row tokens where it has some."""

    def end_of_row_embedding(self):
        return self.decoder.get_input_embeddings().weight[-1][None, None]

    def unconditional_ids(self, ids):
        return super().unconditional_ids(ids) if len(ids) % 2 else [ids[0], ids[-1]]


def shaped(shape, *, dtype=torch.float64, **size):
    """Return a random backbone on a grid."""
    model, tokenizer = random_model(**size)
    backbone = Shaped(model.to(dtype), tokenizer, name="shaped", defaults=Sampling(3.0))
    backbone.grid = shape
    return backbone


@cache
def backbone_on(grid):
    """Return the random float64 backbone on one of `GRIDS`."""
    return shaped(GRIDS[grid])


@cache
def stack() -> nn.Module:
    """Return the transformer stack of the default random model, as transformers made it."""
    return random_model()[0].double().eval().requires_grad_(False).model.language_model


class Uncached:
    """One image of a random backbone under way."""

    def __init__(self, backbone: JanusBackbone, prompt: str, sampling: Sampling) -> None:
        self.backbone, self.sampling = backbone, sampling
        ids = backbone.prompt_ids(prompt)
        prompts = [ids] if sampling.guidance == 1 else [ids, backbone.unconditional_ids(ids)]
        words = stack().get_input_embeddings()
        self.prompts = [words(torch.tensor(one)) for one in prompts]
        self.embeddings: list[Tensor] = []
        self.places: list[int] = []
        self.seen: list[set[int]] = []
        self.laws: dict[int, Tensor] = {}

    def feed(self, code: int | None, place: int, seen: Iterable[int]) -> int:
        """Add a code, or None for an end-of-row token, that sees itself and entries `seen`."""
        table = self.backbone.code_embeddings
        self.embeddings.append(
            self.backbone.end_of_row_embedding()[0, 0] if code is None else table[code]
        )
        self.places.append(place)
        self.seen.append({*seen, len(self.seen)})
        return len(self.seen) - 1

    def law(self, entry: int) -> Tensor:
        """Return the distribution [K] of what follows an entry, or the prompt (-1)."""
        if len(self.seen) not in self.laws:
            self.laws = {len(self.seen): self._laws()}
        return self.laws[len(self.seen)][entry + 1]

    def _laws(self) -> Tensor:
        logits = torch.stack([self._logits(words) for words in self.prompts])
        if len(logits) == 2:
            s = self.sampling.guidance
            logits = logits[1:] + s * (logits[:1] - logits[1:])
        logits = logits[0] / self.sampling.temperature
        if self.sampling.top_k is not None:
            least = logits.sort(descending=True).values[:, self.sampling.top_k - 1, None]
            logits = logits.masked_fill(logits < least, -torch.inf)
        return logits.softmax(-1)

    def _logits(self, words: Tensor) -> Tensor:
        """Return what one stream says after the prompt and after every entry."""
        p, n = len(words), len(self.seen)
        mask = torch.full((p + n, p + n), -torch.inf, dtype=torch.float64)
        mask[:p, :p] = mask[:p, :p].triu(1)
        mask[p:, :p] = 0
        for own, seen in enumerate(self.seen):
            mask[p + own, [p + other for other in seen]] = 0
        out = stack()(
            inputs_embeds=torch.stack([*words, *self.embeddings])[None],
            attention_mask=mask[None, None],
            position_ids=torch.tensor([[*range(p), *(p + place for place in self.places)]]),
            use_cache=False,
        )
        return self.backbone.image_head(out.last_hidden_state[0, p - 1 :])


def invert(mass: Tensor, u: float) -> int:
    """Return the smallest code whose cumulative share of `mass` exceeds u."""
    cumulative = mass.cumsum(0)
    return int((cumulative <= u * cumulative[-1]).sum())


class Holed:
    """One image by the definition: cells decoded, entries fed, and who sees whom."""

    def __init__(self, backbone, prompt, key, *, sampling, proxy="nearest"):
        self.grid, self.proxy = backbone.grid, proxy
        self.model = Uncached(backbone, prompt, sampling)
        self.noise = KeyedNoise(SEED, [key])
        self.cells = {}  # (row, column) -> code
        self.entries = {}  # slot -> entry whose key is in force
        self.fed = set()

    def uniform(self, r, c, purpose="sample", number=0):
        position = torch.tensor([[r * self.grid.cols + c]])
        return float(self.noise.uniform(position, round=number, purpose=purpose))

    def slot(self, r, c):
        return r * self.grid.row_len + c

    def feed(self, tokens):
        """Feed {slot: code} in one pass; each sees what is there, itself and before it."""
        first = len(self.model.seen)
        self.entries |= {slot: first + n for n, slot in enumerate(sorted(tokens))}
        for slot in sorted(tokens):
            self.model.feed(tokens[slot], slot, [e for s, e in self.entries.items() if s <= slot])

    def law(self, r, c):
        """Return p of a cell whose predecessor was fed."""
        return self.model.law(self.entries[self.slot(r, c) - 1] if r or c else -1)

    def stand_in(self, r):
        """Return the code that is fed for the last cell of row `r`, which is not decoded."""
        if self.grid.end_of_row:
            return None
        last = self.grid.cols - 1
        if self.proxy == "nearest":
            at = min(self.cells, key=lambda c: ((r - c[0]) ** 2 + (last - c[1]) ** 2, -c[0]))
        else:
            above = max(r - 1, 0)
            at = max(cell for cell in self.cells if cell[0] == above)
        return self.cells[at]

    def heads(self, r):
        """Return what row r + 1 follows as {slot: code}; nothing if a cell's own feed is it."""
        if not self.grid.end_of_row and (r, self.grid.cols - 1) in self.cells:
            return {}
        return {self.slot(r + 1, 0) - 1: self.stand_in(r)}

    def codes(self):
        width = self.grid.cols
        return [self.cells[n // width, n % width] for n in range(self.grid.size)]

    def new_cells(self):
        new = {cell: code for cell, code in self.cells.items() if cell not in self.fed}
        self.fed |= set(new)
        return {self.slot(*cell): code for cell, code in new.items()}
