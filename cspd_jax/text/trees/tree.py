"""The shape of a draft tree, which is the number of children of every node, by
depth."""

from __future__ import annotations

import dataclasses

import numpy as np

from cspd_jax.check import UserError

_MOST_DRAFTS = 4096


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The shape of a draft tree. A node at depth d has widths[d] children, and the root
    is the last token of the text.

    Nodes are numbered level by level, and the root is node 0. The children of a node
    have consecutive numbers. (1, 1, 1) is a chain of three drafts.

    For example, `TreeShape((2, 1))` has 4 drafts:

        nodes       0, then 1 2, then 3 4
        levels      1, 2, 2
        starts      0, 1, 3
        depths      0, 1, 1, 2, 2
        parents     0, 0, 0, 1, 2
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
        """The number of levels below the root, which is the most drafts that a round
        can accept."""
        return len(self.widths)

    @property
    def levels(self) -> tuple[int, ...]:
        """The number of nodes at each depth, from the root's 1 on."""
        return tuple(int(n) for n in np.cumprod((1, *self.widths)))

    @property
    def starts(self) -> tuple[int, ...]:
        """The number of the first node at each depth."""
        return tuple(int(n) for n in np.cumsum((0, *self.levels[:-1])))

    @property
    def drafts(self) -> int:
        """The number of nodes without the root."""
        return sum(self.levels) - 1

    @property
    def depths(self) -> np.ndarray:
        """The depth of each node, [drafts + 1]."""
        return np.repeat(np.arange(self.depth + 1), self.levels)

    @property
    def parents(self) -> np.ndarray:
        """The parent of each node, [drafts + 1]. The root is its own parent."""
        parents = [0]
        for start, nodes, width in zip(self.starts, self.levels, self.widths):
            parents.extend(np.repeat(start + np.arange(nodes), width))
        return np.array(parents)

    @property
    def ancestors(self) -> np.ndarray:
        """Whether node j is node i or one of its ancestors, bool
        [drafts + 1, drafts + 1]."""
        related = np.eye(self.drafts + 1, dtype=bool)
        for node, parent in enumerate(self.parents):
            related[node] |= related[parent]
        return related
