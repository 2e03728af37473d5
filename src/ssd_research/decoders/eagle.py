"""How an EAGLE drafter drafts a tree, or a chain, for a batch of images under way.

The drafter reads pairs (h, e) of a state and the code that it predicted. At the committed codes h
is the backbone's own, behind them the drafter's own output, level by level:

    pairs       [h0; e0] ... [h(n-1); e(n-1)] | [h'(n); e(x)]  for the codes x drafted for n
    gives        h1               h'(n)       |     h'(n+1)    and from it the drafts for n+1
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssd_research.backbones.attention import RasterPass
from ssd_research.decoders.chain import Chain
from ssd_research.decoders.tree import Drafts, Tree, at, spots
from ssd_research.eagle import EagleDrafter


class EagleDrafting:
    """A drafter with its keys and values: pair i in slot i, drafted codes in slots of their own."""

    def __init__(self, drafter: EagleDrafter, chain: Chain, tree: Tree) -> None:
        self.drafter, self.chain, self.tree = drafter, chain, tree
        self.slots = chain.size + len(tree)
        # One slot more for what a batch feeds where an image has nothing to feed.
        self.kv = drafter.new_cache(chain.state.streams, self.slots + 1)
        self.read = torch.zeros_like(chain.committed)
        self.family = tree.family.to(chain.committed.device)

    def draft(self, number: int) -> Drafts:
        """Draft a tree behind each image's newest code, with the noise of round `number`."""
        chain, tree = self.chain, self.tree
        with chain.state.timed("draft"):
            made = _Made.empty(chain, tree)
            h, above = self._read_committed(), [0]
            for level in range(1, tree.depth + 1):
                left = chain.state.distribution_of(h)
                self._sample(made, left, above, level=level, number=number)
                inner = tree.parents(level)
                if inner:
                    h = self._read_drafts(made, inner, h, above)
                above = inner
        return Drafts(made.codes, made.q, made.there)

    def _read_committed(self) -> Float[Tensor, "S 1 D"]:
        """Feed the pairs committed since the last step; return the state after the newest one."""
        chain, state = self.chain, self.chain.state
        count = chain.committed - self.read
        index = torch.arange(int(count.max()), device=count.device)
        where = self.read[:, None] + index
        place = where.clamp_max(chain.size - 1)
        h = self._feed(
            state.states(place),
            state.codes.gather(1, place),
            slots=where.where(index < count[:, None], self.slots),
            places=place,
        )
        # What a finished image still reads in a batch, it would not read alone.
        own = (index < count[:, None]) & (chain.committed < chain.size)[:, None]
        state.meter.count_eagle(own.sum(1), ((where + 1) * own).sum(1))
        self.read = chain.committed
        return at(h, (count - 1).clamp_min(0).repeat(len(h) // len(count))[:, None])

    def _read_drafts(
        self, made: "_Made", nodes: list[int], h: Float[Tensor, "S P D"], above: list[int]
    ) -> Float[Tensor, "S Q D"]:
        """Feed the drafts at `nodes`; `h` are the states that predicted the children of `above`."""
        chain = self.chain
        drafts = torch.tensor(nodes, device=made.codes.device) - 1
        slots = torch.arange(self.slots, device=drafts.device)
        seen = (slots < chain.committed[:, None, None]).repeat(1, len(nodes), 1)
        seen[..., chain.size :] = self.family[drafts]
        there = made.there[:, drafts]
        chain.state.meter.count_eagle(there.sum(1), (seen.sum(-1) * there).sum(1))
        return self._feed(
            h[:, [above.index(self.tree.parent(node)) for node in nodes]],
            made.codes[:, drafts],
            slots=(chain.size + drafts).expand(len(seen), -1),
            places=made.positions[:, drafts],
            visible=seen,
        )

    def _feed(
        self,
        h: Float[Tensor, "S L D"],
        codes: Int[Tensor, "B L"],
        *,
        slots: Int[Tensor, "B L"],
        places: Int[Tensor, "B L"],
        visible: Bool[Tensor, "B L T"] | None = None,
    ) -> Float[Tensor, "S L D"]:
        """Run the drafter on all streams, which share codes, slots and places."""
        twice = len(h) // len(codes)
        e = self.chain.state.backbone.embed(codes).repeat(twice, 1, 1)
        slots, places = slots.repeat(twice, 1), places.repeat(twice, 1)
        seen = None if visible is None else visible.repeat(twice, 1, 1)
        plan = RasterPass.plan(self.kv, slots, shared=None, visible=seen, places=places)
        return self.drafter(h, e, places, plan)

    def _sample(
        self,
        made: "_Made",
        left: Float[Tensor, "B P K"],
        above: list[int],
        *,
        level: int,
        number: int,
    ) -> None:
        """Draw the children of the nodes `above`, whose laws `left` are, without replacement.

        The elder siblings' codes are taken out before a younger one is drawn, so its law is
        q(x) / (1 - sum of theirs).
        """
        chain, tree = self.chain, self.tree
        for rank in range(tree.children.shape[1]):
            nodes = tree.nodes(level, rank)
            if not nodes:
                break
            parents = [tree.parent(node) for node in nodes]
            columns = [above.index(parent) for parent in parents]
            drafts = torch.tensor(nodes, device=left.device) - 1
            law = left[:, columns]
            mass = law.sum(-1, keepdim=True)
            there = (mass[..., 0] > 0) & (made.positions[:, drafts] < chain.size)
            if level > 1:
                there &= made.there[:, [parent - 1 for parent in parents]]
            draw = chain.noise.at(spots(chain, tree, drafts[None] + 1), number)
            code = draw.categorical(law, purpose="draft", needed=there)
            made.codes[:, drafts], made.there[:, drafts] = code, there
            made.q[:, drafts] = torch.where(mass > 0, law / mass, 0)
            left[:, columns] = law.scatter(-1, code[..., None], 0)


@dataclass(frozen=True)
class _Made:
    """Drafts in the making, and the raster positions of all nodes from 1 on."""

    codes: Int[Tensor, "B M"]
    q: Float[Tensor, "B M K"]
    there: Bool[Tensor, "B M"]
    positions: Int[Tensor, "B M"]

    @classmethod
    def empty(cls, chain: Chain, tree: Tree) -> "_Made":
        depths = tree.depths[1:].to(chain.committed.device)
        positions = chain.committed[:, None] - 1 + depths
        codes = torch.zeros_like(positions)
        laws = (*positions.shape, chain.state.backbone.codebook_size)
        q = torch.zeros(laws, dtype=chain.dtype, device=codes.device)
        return cls(codes, q, torch.zeros_like(codes, dtype=torch.bool), positions)
