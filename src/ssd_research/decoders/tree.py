"""The shape of a tree of drafts: several guesses for a position, each with guesses for the next."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ssd_research.decoders.chain import Chain


@dataclass(frozen=True)
class Tree:
    """The shape of a tree, the same for every step: its nodes as paths of child numbers.

    Node 0 is the newest code, nodes 1, 2, ... are `paths[0]`, `paths[1]`, ..., shorter ones first;
    the path (1, 0) is the first child of the second child of node 0.
    """

    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, given: Iterable) -> "Tree":
        """Read `decoder.tree`: children of every node, level by level, or a list of paths.

        [2, 1] and [[0], [1], [0, 0], [1, 0]] are the same tree. Raises ValueError for a path whose
        parent or elder sibling is not there.
        """
        levels = list(given)
        if levels and all(_whole(n) and n > 0 for n in levels):
            spans = [range(n) for n in levels]
            found = {p for d in range(1, len(spans) + 1) for p in product(*spans[:d])}
        elif levels and all(isinstance(p, Sequence) and p and all(map(_whole, p)) for p in levels):
            found = {tuple(path) for path in levels}
        else:
            raise ValueError(
                f"decoder.tree={levels} is neither the children of a node at each level, as in "
                "[3,2,1], nor a list of paths, as in [[0],[1],[0,0]]"
            )
        for path in sorted(found):
            missing = {path[:-1]} - found - {()}
            if path[-1] > 0:
                missing |= {(*path[:-1], path[-1] - 1)} - found
            if missing or min(path) < 0:
                lacking = f" lacks the path {list(min(missing))}, but" if missing else ""
                raise ValueError(f"decoder.tree{lacking} has the path {list(path)}")
        return cls(tuple(sorted(found, key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, depth: int) -> "Tree":
        """Return the tree of one path."""
        return cls.of([1] * depth)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        """How many codes the longest path has."""
        return len(self.paths[-1])

    @cached_property
    def number(self) -> dict[tuple[int, ...], int]:
        """The node of every path."""
        return {(): 0} | {path: node for node, path in enumerate(self.paths, 1)}

    def nodes(self, level: int, rank: int) -> list[int]:
        """Return the nodes of a level that are the child number `rank` of their parents."""
        return [self.number[p] for p in self.paths if len(p) == level and p[-1] == rank]

    def parents(self, level: int) -> list[int]:
        """Return the nodes of a level that have children."""
        return sorted({self.number[p[:-1]] for p in self.paths if len(p) == level + 1})

    def parent(self, node: int) -> int:
        """Return the parent of a node."""
        return self.number[self.paths[node - 1][:-1]]

    @cached_property
    def children(self) -> Int[Tensor, "nodes width"]:
        """The children of every node in order, 0 where there is none."""
        width = 1 + max(path[-1] for path in self.paths)
        table = torch.zeros(len(self) + 1, width, dtype=torch.long)
        for node, path in enumerate(self.paths, 1):
            table[self.parent(node), path[-1]] = node
        return table

    @cached_property
    def depths(self) -> Int[Tensor, " nodes"]:
        """The level of every node, 0 for node 0."""
        return torch.tensor([0, *map(len, self.paths)])

    @cached_property
    def ranks(self) -> Int[Tensor, " nodes"]:
        """The place of every node among those of its level, from 0."""
        return torch.arange(len(self) + 1) - torch.searchsorted(self.depths, self.depths)

    @cached_property
    def family(self) -> Bool[Tensor, "drafts drafts"]:
        """Which drafts (nodes from 1) are a draft itself or its ancestors."""
        table = torch.eye(len(self), dtype=torch.bool)
        for node in range(1, len(self) + 1):
            if parent := self.parent(node):
                table[node - 1] |= table[parent - 1]
        return table


def _whole(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool)


def spots(chain: Chain, tree: Tree, nodes: Int[Tensor, "X L"]) -> Int[Tensor, "B L"]:
    """Return where the noise of nodes lies: the drafts of one position each have their own.

    It is that of the position so many images further on, so a tree of one path has a chain's noise.
    """
    depths, ranks = tree.depths.to(nodes.device), tree.ranks.to(nodes.device)
    return chain.committed[:, None] - 1 + depths[nodes] + ranks[nodes] * chain.size


@dataclass(frozen=True)
class Drafts:
    """What was drafted at the M nodes from 1 on.

    `q` is the law that each code was drawn from: for a younger sibling without the elder ones'
    codes. `there` is False beyond the image, and where all codes of q were taken.
    """

    codes: Int[Tensor, "B M"]
    q: Float[Tensor, "B M K"]
    there: Bool[Tensor, "B M"]


def at(x: Float[Tensor, "B M K"], index: Int[Tensor, "B L"]) -> Float[Tensor, "B L K"]:
    """Return the rows of `x` at `index`, which each image has of its own."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
