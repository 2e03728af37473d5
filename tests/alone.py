"""One image at a time, without cache, state or batch: what references of decoders are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conftest import both_streams
from ssd_research.backbones.janus import JanusBackbone
from ssd_research.backbones.tiny import random_model
from ssd_research.decoders.noise import KeyedNoise
from ssd_research.grid import TokenGrid
from ssd_research.heads import Axis, DraftHeads
from ssd_research.sampling import Sampling

SEED, KEYS = 11, [101, 202]
PROMPTS = ["a red circle", "a large pink square left of a small black circle"]


class LuminaLike(JanusBackbone):
    """Janus's classes with Lumina's habits: end-of-row tokens and a short unconditional prompt."""

    def end_of_row_embedding(self) -> Tensor:
        return self.decoder.get_input_embeddings().weight[-1][None, None]

    def unconditional_ids(self, ids: list[int]) -> list[int]:
        return [ids[0], self.tokenizer.pad_token_id, ids[-1]]


def lumina_like(
    rows: int, cols: int, *, dtype: torch.dtype = torch.float64, guidance: float = 3.0, **size: int
) -> LuminaLike:
    """Return a random backbone whose rows end with a token."""
    model, tokenizer = random_model(**size)
    model.config.text_config.max_position_embeddings += rows * cols
    backbone = LuminaLike(
        model.to(dtype), tokenizer, name="lumina", defaults=Sampling(guidance=guidance)
    )
    backbone.grid = TokenGrid(rows, cols, end_of_row=True)
    return backbone


def inverted(mass: Tensor, u: float) -> int:
    """Return the smallest code whose cumulative share of `mass` [K] exceeds u."""
    cumulative = mass.cumsum(0)
    return int((cumulative <= u * cumulative[-1]).sum())


@dataclass
class Alone:
    """One image under way and the noise that is its own; every law is recomputed from the codes."""

    backbone: JanusBackbone
    sampling: Sampling
    image: int
    heads: DraftHeads | None = None
    rounds: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    steps: int = 1
    tokens: int = 0

    def states(self, codes: Sequence[int]) -> Tensor:
        """Return h_pre [2, N, D] of both streams given the first codes; the rest see junk."""
        size, key = self.backbone.grid.size, tuple(codes)
        if key not in self.known:
            junk = torch.full((1, size), self.backbone.codebook_size - 1)
            junk[0, : len(codes)] = torch.tensor(codes[:size])
            self.known = {key: both_streams(self.backbone, [PROMPTS[self.image]], junk)}
        return self.known[key]

    def law(self, h: Tensor) -> Tensor:
        """Return the guided, filtered distributions [L, K] of states [2, L, D]."""
        s = self.sampling
        cond, uncond = self.backbone.image_head(self.backbone.decoder.norm.forward(h))
        p = ((uncond + s.guidance * (cond - uncond)) / s.temperature).softmax(-1)
        if s.top_k is not None:
            p = p * (p >= p.sort(-1, descending=True).values[..., s.top_k - 1, None])
            p = p / p.sum(-1, keepdim=True)
        if s.top_p is not None:
            likelier = ((p[..., None, :] > p[..., None]) * p[..., None, :]).sum(-1)
            p = p * (likelier < s.top_p)
        return p / p.sum(-1, keepdim=True)

    def p(self, codes: Sequence[int]) -> Tensor:
        """Return p [N, K]; right at every position up to the first that has no code."""
        return self.law(self.states(codes))

    def q(self, axis: Axis, offset: int, source: int, codes: Sequence[int]) -> Tensor:
        """Return what a head says from `source`, whose code is among `codes`."""
        h = self.states(codes)[:, source]
        e = self.backbone.code_embeddings[codes[source]].expand_as(h)
        return self.law(self.heads.head(axis, offset)(h, e)[:, None])[0]

    def u(self, position: int, number: int, purpose: str) -> float:
        """Return the image's own uniform."""
        noise = KeyedNoise(SEED, KEYS[self.image : self.image + 1])
        return float(noise.uniform(torch.tensor([[position]]), round=number, purpose=purpose))

    def gumbel(self, position: int) -> Tensor:
        """Return the image's own Gumbel variables [K] of a position."""
        noise = KeyedNoise(SEED, KEYS[self.image : self.image + 1])
        return noise.gumbel(torch.tensor([[position]]), self.backbone.codebook_size, round=0)[0, 0]

    def first(self) -> int:
        """Sample the first code."""
        return inverted(self.p([])[0], self.u(0, 0, "sample"))

    def step(self, fed: Sequence[int], *, ends: bool = True) -> None:
        """Count a forward that feeds the codes at positions and the tokens that end rows."""
        cols = self.backbone.grid.cols
        folded = sum(1 for j in fed if (j + 1) % cols == 0) if ends else 0
        self.steps += 1
        self.tokens += len(fed) + folded * self.backbone.grid.end_of_row

    def record(self, key: tuple[str, int], drafted: int, accepted: int) -> None:
        """Count drafts and those accepted."""
        entry = self.rounds.setdefault(key, [0, 0])
        entry[0] += drafted
        entry[1] += accepted


def assert_equal(made, backbone, sampling, decode, *, heads=None) -> None:
    """Compare a batch's Generation with `decode(alone) -> codes` of each image."""
    for n in range(len(PROMPTS)):
        alone = Alone(backbone, sampling, n, heads)
        codes = decode(alone)
        assert made.codes[n].tolist() == codes
        assert (made.nfe[n], made.tokens[n]) == (alone.steps, alone.tokens)
        found = {
            (entry["stage"], entry["round"]): [entry["drafted"][n], entry["accepted"][n]]
            for entry in made.rounds
        }
        assert found == alone.rounds


def assert_other_codes(made, backbone, sampling, decode, *, heads=None) -> None:
    """Check that a mutant's codes are not those of `decode(alone)`."""
    expected = [decode(Alone(backbone, sampling, n, heads)) for n in range(len(PROMPTS))]
    assert made.codes.tolist() != expected


def chain_step(alone: Alone, codes: list[int], chain: dict, number: int, *, stop: int, **rule):
    """Feed and test `chain`, {position: (draft, q)}, from the newest code; extend `codes`.

    Returns p [N, K] and how many drafts were accepted. `rule` may replace `odds`.
    """
    odds = rule.get("odds", lambda p, q, x: p[x] / q[x])
    n, size = len(codes), alone.backbone.grid.size
    p = alone.p([*codes, *(x for x, _ in chain.values())])
    alone.step([j for j in (n - 1, *chain) if j + 1 < stop])
    accepted = 0
    for j, (x, q) in chain.items():
        if alone.u(j, number, "accept") < min(1, odds(p[j], q, x)):
            codes.append(x)
            accepted += 1
            continue
        codes.append(inverted((p[j] - q).clamp_min(0), alone.u(j, number, "residual")))
        break
    else:
        if len(codes) < min(stop, size):
            codes.append(inverted(p[len(codes)], alone.u(len(codes), number, "residual")))
    alone.record(("chain", 1), len(chain), accepted)
    return p
