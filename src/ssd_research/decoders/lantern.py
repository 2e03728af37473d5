"""LANTERN (Jang et al. 2025) and LANTERN++ (Park et al. 2025): any drafter x any accept rule.

Drafters: the horizontal draft heads as a sampled chain, as in `mtp_strict`, or an EAGLE drafter as
a chain or a static tree. Accept rules: strict, which is exact with either, and the two relaxed ones
of `relaxed.py`. The published pair is EAGLE with a relaxed rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ssd_research.backbones.base import Backbone
from ssd_research.backbones.meter import Generation
from ssd_research.decoders.accept import AcceptRule, Rejection
from ssd_research.decoders.base import Decoder, require_whole
from ssd_research.decoders.chain import Chain
from ssd_research.decoders.eagle import EagleDrafting
from ssd_research.decoders.multi_token import draft_chain, segments
from ssd_research.decoders.noise import Noise
from ssd_research.decoders.relaxed import Relaxed
from ssd_research.decoders.tree import Drafts, Tree
from ssd_research.decoders.tree_chain import TreeChain
from ssd_research.eagle import Drafter, EagleDrafter
from ssd_research.grid import TokenGrid
from ssd_research.heads import DraftHeads
from ssd_research.sampling import Sampling

CHAIN = 5  # codes drafted in a row unless told otherwise, as by SSD's heads and LANTERN's trees
PLUS_PLUS = {"k": 10, "lam": 5.0}  # the first of LANTERN++'s published pairs (5, 10) and (5, 20)
USED = {  # the options that each choice reads
    "drafter": {"heads": ("k_h",), "eagle": ("depth", "tree")},
    "accept": {"strict": (), "lantern": ("k", "delta"), "lantern_pp": ("k", "lam")},
}


@dataclass(frozen=True)
class HeadsDrafting:
    """Horizontal draft heads as a drafter: chains of up to `length` codes, as `mtp_strict` does."""

    heads: DraftHeads
    chain: Chain
    length: int

    def draft(self, number: int) -> Drafts:
        """Draft a chain behind each image's newest code, with the noise of round `number`."""
        where, q, codes = draft_chain(self.chain, self.heads, length=self.length, number=number)
        return Drafts(codes, q, where >= 0)


@dataclass(frozen=True)
class Lantern(Decoder):
    """Speculative decoding whose accept rule may count the neighbours of a draft as the draft.

    Parameters left at None are 5 drafts in a row, and of the rule the method's own: for LANTERN k
    and delta of `operating_point`, the model's, since k goes with the size of a codebook.
    """

    drafter: str = "heads"
    k_h: int | None = None
    depth: int | None = None
    tree: Sequence[Any] | None = None
    accept: str = "lantern"
    k: int | None = None
    delta: float | None = None
    lam: float | None = None
    operating_point: Mapping[str, float] = field(default_factory=lambda: {"k": 1000, "delta": 0.1})
    name: str = "lantern"
    needs_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for key, choices in USED.items():
            self._check_choice(key, choices)
        if self.tree is not None and self.depth is not None:
            raise ValueError("decoder.tree has a depth of its own: leave decoder.depth out")
        for key, least in (("k_h", 1), ("depth", 1), ("k", 0)):
            if getattr(self, key) is not None:
                require_whole(key, getattr(self, key), least=least)
        for key, least, most in (("delta", 0, 1), ("lam", 1, float("inf"))):
            value = getattr(self, key)
            if value is not None and not (
                isinstance(value, int | float) and least <= value <= most
            ):
                raise ValueError(f"decoder.{key}={value} must be a number from {least} to {most}")
        if self.drafter == "eagle":
            self.shape()

    def _check_choice(self, key: str, choices: Mapping[str, tuple[str, ...]]) -> None:
        """Raise ValueError for an unknown choice, and for an option that only others read."""
        chosen = getattr(self, key)
        if chosen not in choices:
            raise ValueError(f"decoder.{key}={chosen} is not one of {', '.join(choices)}")
        for option in {one for used in choices.values() for one in used} - set(choices[chosen]):
            if getattr(self, option) is not None:
                readers = [name for name, used in choices.items() if option in used]
                raise ValueError(
                    f"decoder.{option}={getattr(self, option)} does nothing with "
                    f"decoder.{key}={chosen}; it belongs to {', '.join(readers)}"
                )

    @property
    def lossless(self) -> bool:
        """Whether nothing is relaxed."""
        point = self.relaxation
        return not point.get("k") or point.get("delta") == 0 or point.get("lam") == 1

    @property
    def relaxation(self) -> dict[str, Any]:
        """The parameters of the accept rule in force."""
        own = {"lantern": self.operating_point, "lantern_pp": PLUS_PLUS}.get(self.accept, {})
        given = {key: getattr(self, key) for key in USED["accept"][self.accept]}
        return {key: own[key] if value is None else value for key, value in given.items()}

    def shape(self) -> Tree:
        """Return the tree that an EAGLE drafter fills: the one given, or a chain."""
        if self.tree is not None:
            return Tree.of(self.tree)
        return Tree.chain(self.depth or CHAIN)

    def settings(self, grid: TokenGrid) -> dict[str, Any]:
        """Return what is in force: drafter and its reach, accept rule and its parameters."""
        if self.drafter == "heads":
            reach: dict[str, Any] = {"k_h": self.k_h or CHAIN}
        elif self.tree is None:
            reach = {"depth": self.shape().depth}
        else:
            reach = {"tree": [list(path) for path in self.shape().paths]}
        return {"drafter": self.drafter, **reach, "accept": self.accept, **self.relaxation}

    def reach(self, grid: TokenGrid) -> dict[str, Any]:
        """Return how far chains of heads reach, or that the drafter is EAGLE's."""
        if self.drafter == "eagle":
            return {"kind": "eagle"}
        longest = len(segments(grid)[0]) - 1
        return {"horizontal": min(self.k_h or CHAIN, longest), "vertical": 0}

    def rule(self, backbone: Backbone) -> AcceptRule:
        """Return the accept rule; ValueError for more neighbours than there are other codes."""
        if self.accept == "strict":
            return Rejection()
        point = self.relaxation
        if point["k"] >= backbone.codebook_size:
            raise ValueError(
                f"decoder.k={point['k']} must be below the {backbone.codebook_size} codes of "
                f"{backbone.name}"
            )
        nearest = backbone.nearest_codes(int(point["k"]))
        return Relaxed(nearest, delta=point.get("delta", 0.0), lam=point.get("lam"))

    @torch.inference_mode()
    def decode_with(
        self,
        backbone: Backbone,
        prompts: Sequence[str],
        *,
        sampling: Sampling,
        noise: Noise,
        heads: Drafter | None,
    ) -> Generation:
        """Decode with a given source of noise."""
        if heads is None:
            raise ValueError(f"decoder={self.name} needs trained heads: set heads.path")
        rule, number = self.rule(backbone), 0
        step = self._tree_step if self.tree is not None else self._chain_step
        chain, drafting = self._start(
            backbone, prompts, sampling=sampling, noise=noise, heads=heads
        )
        while not chain.done:
            number += 1
            step(chain, drafting, rule, number)
        return chain.state.finish()

    def _start(
        self,
        backbone: Backbone,
        prompts: Sequence[str],
        *,
        sampling: Sampling,
        noise: Noise,
        heads: Drafter,
    ) -> tuple[Any, Any]:
        """Prefill; return the images under way and what drafts for them."""
        if self.tree is not None:
            tree = self.shape()
            scratch = TreeChain.scratch(tree, end_of_row=backbone.grid.end_of_row)
            state = backbone.start(prompts, sampling=sampling, scratch=scratch)
            chain: Chain = TreeChain(state, noise, tree)
        else:
            chain = Chain(backbone.start(prompts, sampling=sampling), noise)
        if isinstance(heads, EagleDrafter):
            return chain, EagleDrafting(heads, chain, self.shape())
        return chain, HeadsDrafting(heads, chain, self.k_h or CHAIN)

    def _chain_step(
        self,
        chain: Chain,
        drafting: HeadsDrafting | EagleDrafting,
        rule: AcceptRule,
        number: int,
    ) -> None:
        """Draft a chain, test it in one pass, and commit up to one code beyond the first reject."""
        made = drafting.draft(number)
        positions = chain.window(made.codes.shape[1]).where(made.there, -1)
        p = chain.forward(made.codes, positions)
        verdict = chain.test(
            rule, p=p, q=made.q, drafts=made.codes, positions=positions, number=number
        )
        chain.commit(verdict)

    def _tree_step(
        self, chain: TreeChain, drafting: EagleDrafting, rule: AcceptRule, number: int
    ) -> None:
        """Draft a tree, test it in one pass, and commit a path of it and one code beyond."""
        made = drafting.draft(number)
        p, fed = chain.forward_tree(made)
        verdict, path = chain.test_tree(rule, p=p, drafts=made, number=number)
        chain.adopt(path, fed)
        chain.commit(verdict)
