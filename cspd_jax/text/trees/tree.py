"""The shape of a draft tree: how many children every node has, by depth."""

from __future__ import annotations

import dataclasses

import numpy as np

from cspd_jax.check import UserError

_MOST_DRAFTS = 4096


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree whose nodes at depth d have widths[d] children each; the root is the last
    token of the text.

    Nodes are numbered level by level from the root, which is 0; the children of a node
    are neighbours. (1, 1, 1) is a chain of three drafts.
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        nodes = 0
        level = 1
        for width in self.widths:
            level *= width
            nodes += level
            if nodes > _MOST_DRAFTS:
                raise UserError(
                    f"a tree may have {_MOST_DRAFTS} drafts; this one has more: use"
                    " lower widths"
                )

    @property
    def depth(self) -> int:
        """Levels below the root: the most drafts that a round can accept."""
        return len(self.widths)

    @property
    def levels(self) -> tuple[int, ...]:
        """Nodes of each depth, from the root's 1 on."""
        return tuple(int(n) for n in np.cumprod((1, *self.widths)))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first node of each depth."""
        return tuple(int(n) for n in np.cumsum((0, *self.levels[:-1])))

    @property
    def drafts(self) -> int:
        """Nodes without the root."""
        return sum(self.levels) - 1

    @property
    def depths(self) -> np.ndarray:
        """[drafts + 1] the depth of each node."""
        return np.repeat(np.arange(self.depth + 1), self.levels)

    @property
    def parents(self) -> np.ndarray:
        """[drafts + 1] the parent of each node; the root's is itself."""
        parents = [0]
        for start, nodes, width in zip(self.starts, self.levels, self.widths):
            parents.extend(np.repeat(start + np.arange(nodes), width))
        return np.array(parents)

    @property
    def ancestors(self) -> np.ndarray:
        """[drafts + 1, drafts + 1] bool, whether node j is node i or lies on its way to
        the root."""
        related = np.eye(self.drafts + 1, dtype=bool)
        for node, parent in enumerate(self.parents):
            related[node] |= related[parent]
        return related
