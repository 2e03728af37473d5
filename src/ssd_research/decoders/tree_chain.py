"""Trees of drafts, tested in one pass and walked down from the newest code to the first dead end.

The newest code is fed in its own slot, the drafts in scratch slots, and each draft sees the image
so far and its ancestors. Then a node's children are tested in order: each reject changes p, and the
first accepted child is the next node. The keys and values on that path move to the image's slots
(EAGLE's verification; lossless with the strict rule).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssd_research.backbones.state import DecodingState
from ssd_research.decoders.accept import AcceptRule
from ssd_research.decoders.chain import Chain, Verdict
from ssd_research.decoders.noise import Noise
from ssd_research.decoders.tree import Drafts, Tree, at, spots


@dataclass(frozen=True)
class FedTree:
    """A tree as it was fed: which of its M + 1 nodes were, and which with a row's end after them.

    `h` holds the states that predict what follows each node: its own, or its end-of-row token's.
    """

    nodes: Bool[Tensor, "B N"]
    ends: Bool[Tensor, "B N"]
    h: Float[Tensor, "S N D"]


class TreeChain(Chain):
    """A batch of images under way, whose next codes are drafted as a tree; node 0 is the newest."""

    def __init__(self, state: DecodingState, noise: Noise, tree: Tree) -> None:
        """Sample the code at position 0 of every image; `state` has `scratch(tree)` slots."""
        super().__init__(state, noise)
        self.tree = tree
        device = state.codes.device
        self.depths, self.children = tree.depths.to(device), tree.children.to(device)
        self.family = tree.family.to(device)

    @staticmethod
    def scratch(tree: Tree, *, end_of_row: bool) -> int:
        """Return how many scratch slots a tree takes: one a draft, and one for a row's end."""
        return len(tree) * (1 + end_of_row)

    def forward_tree(self, drafts: Drafts) -> tuple[Float[Tensor, "B N K"], FedTree]:
        """Feed the newest code and the drafts; return p after each node, and what was fed."""
        state, grid = self.state, self.state.backbone.grid
        positions = self.committed[:, None] - 1 + self.depths
        there = F.pad(drafts.there, (1, 0), value=True)
        fed = there & (positions + 1 < self.size)
        ends = fed & ((positions + 1) % self.cols == 0) & torch.tensor(grid.end_of_row)
        places = grid.slot(positions.clamp(0, self.size - 1))
        scratch = torch.arange(len(self.tree), device=places.device) + grid.slots
        slots = torch.cat([places[:, :1], scratch.expand(len(places), -1)], 1)
        end_slots = torch.cat([places[:, :1] + 1, slots[:, 1:] + len(self.tree)], 1)
        # A row's ends have columns of their own, as far as any image of the batch needs them.
        extra = ends.any(0).nonzero()[:, 0]
        codes = torch.cat([state.codes.gather(1, positions[:, :1]), drafts.codes], 1)
        h = state.feed(
            torch.cat([codes, codes[:, extra]], 1),
            torch.cat([slots.where(fed, -1), end_slots.where(ends, -1)[:, extra]], 1),
            phase="verify",
            visible=self._visible(places[:, 0], ends, extra),
            places=torch.cat([places, places[:, extra] + 1], 1),
        )
        with state.timed("verify"):
            after = torch.arange(codes.shape[1], device=h.device).expand_as(ends).clone()
            after[:, extra] = after[:, extra].where(
                ~ends[:, extra], codes.shape[1] + torch.arange(len(extra), device=h.device)
            )
            h = at(h, after.repeat(state.streams // state.batch, 1))
            return state.distribution_of(h), FedTree(fed, ends, h)

    def _visible(
        self, newest: Int[Tensor, " B"], ends: Bool[Tensor, "B N"], extra: Int[Tensor, " E"]
    ) -> Bool[Tensor, "B L T"]:
        """Return which image and scratch slots each node sees, then each fed end of a row."""
        grid, count = self.state.backbone.grid, len(self.tree)
        slots = torch.arange(self.state.slots, device=newest.device)
        image = slots < grid.slot(self.committed)[:, None, None]
        seen = image.repeat(1, count + 1, 1)
        seen[:, 0] = slots <= newest[:, None]
        first, last = grid.slots, grid.slots + count
        seen[:, 1:, first:last] = self.family
        if not grid.end_of_row:
            return seen
        elders = self.family & ~torch.eye(count, dtype=torch.bool, device=newest.device)
        seen[:, 1:, last:] = elders & ends[:, None, 1:]
        own = seen.clone()
        own[:, 0] = image[:, 0]
        own[:, 1:, last:] |= torch.eye(count, dtype=torch.bool, device=newest.device)
        return torch.cat([seen, own[:, extra]], 1)

    def test_tree(
        self, rule: AcceptRule, *, p: Float[Tensor, "B N K"], drafts: Drafts, number: int
    ) -> tuple[Verdict, Int[Tensor, "B depth"]]:
        """Walk down from node 0 to the last accepted node; return the verdict and the path.

        The path holds 0 below the last accepted node. The fresh code is drawn from what p became
        after that node's children were rejected.
        """
        with self.state.timed("verify"):
            node = torch.zeros_like(self.committed)[:, None]
            law, walking = p[:, :1], torch.ones_like(node, dtype=torch.bool)
            path = node.repeat(1, self.tree.depth)
            for level in range(self.tree.depth):
                child, law = self._choose(
                    rule, node, walking, law=law, drafts=drafts, number=number
                )
                walking = child > 0
                if not bool(walking.any()):
                    break
                node = child.where(walking, node)
                law = torch.where(walking[..., None], at(p, node), law)
                path[:, level : level + 1] = child
            self._record(path, drafts)
            return self._verdict(path, law, drafts, number), path

    def _choose(
        self,
        rule: AcceptRule,
        node: Int[Tensor, "B 1"],
        walking: Bool[Tensor, "B 1"],
        *,
        law: Float[Tensor, "B 1 K"],
        drafts: Drafts,
        number: int,
    ) -> tuple[Int[Tensor, "B 1"], Float[Tensor, "B 1 K"]]:
        """Test a node's children in order; return the accepted one (0: none) and what p became."""
        chosen = torch.zeros_like(node)
        for rank in range(self.children.shape[1]):
            child = self.children[node, rank]
            draft = (child - 1).clamp_min(0)
            tested = walking & (chosen == 0) & (child > 0) & drafts.there.gather(1, draft)
            if not bool(tested.any()):
                break
            x, q = drafts.codes.gather(1, draft), at(drafts.q, draft)
            draw = self.noise.at(spots(self, self.tree, child), number)
            kept = tested & draw.bernoulli(rule.odds(law, q, x), needed=tested)
            other = rule.correction(law, q, x)
            other = other / other.sum(-1, keepdim=True)
            law = torch.where((tested & ~kept)[..., None], other, law)
            chosen = child.where(kept, chosen)
        return chosen, law

    def _verdict(
        self,
        path: Int[Tensor, "B depth"],
        law: Float[Tensor, "B 1 K"],
        drafts: Drafts,
        number: int,
    ) -> Verdict:
        """Draw the one code beyond the path, where the image goes on."""
        kept = path > 0
        count = kept.sum(1, keepdim=True)
        position = self.committed[:, None] + count
        inside = position < self.size
        draw = self.noise.at(position, number)
        new = draw.categorical(law, purpose="residual", needed=inside)
        place = torch.arange(path.shape[1] + 1, device=path.device)
        fresh = (place == count) & inside
        codes = F.pad(drafts.codes.gather(1, (path - 1).clamp_min(0)), (0, 1))
        return Verdict(kept, torch.where(fresh, new, codes), fresh)

    def _record(self, path: Int[Tensor, "B depth"], drafts: Drafts) -> None:
        accepted = torch.zeros_like(F.pad(drafts.there, (1, 0))).scatter(1, path, True)[:, 1:]
        self.state.record_round("tree", 1, accepted, drafted=drafts.there)

    def adopt(self, path: Int[Tensor, "B depth"], fed: FedTree) -> None:
        """Make the accepted path part of the image: keys, values and states; before `commit`."""
        state, grid, count = self.state, self.state.backbone.grid, len(self.tree)
        positions = self.places(path.shape[1])
        moved = (path > 0) & fed.nodes.gather(1, path)
        ended = (path > 0) & fed.ends.gather(1, path)
        source = grid.slots + path - 1
        target = grid.slot(positions.clamp_max(self.size - 1))
        state.keep(
            torch.cat([source.where(moved, -1), (source + count).where(ended, -1)], 1),
            torch.cat([target.where(moved, -1), (target + 1).where(ended, -1)], 1),
        )
        twice = state.streams // state.batch
        rows = torch.arange(state.streams, device=path.device)[:, None].expand(-1, path.shape[1])
        where, after = moved.repeat(twice, 1), (positions + 1).repeat(twice, 1)
        h = at(fed.h, path.repeat(twice, 1))
        state.h_pre[rows[where], after[where]] = h[where]
