"""The methods that continue texts. The texts of every method have the same distribution
as the texts of `Plain()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import jax
import numpy as np

from cspd_jax._utils.options import documented, option
from cspd_jax.check import UserError
from cspd_jax.language_models import Model
from cspd_jax.text.drafters import (
    DrafterLike,
    Drafting,
    resolve_drafter,
)
from cspd_jax.text.rules import RULES
from cspd_jax.text.trees.drafter import draft_tree
from cspd_jax.text.trees.head import head_tree
from cspd_jax.text.trees.rounds import TREE_RULES

Array = jax.Array
_UNREPORTED = {"report": ""}


@dataclasses.dataclass(frozen=True)
class Plain:
    """Plain decoding, one token after the other. It is the reference for the other
    methods."""

    name: ClassVar[str] = "plain"


@documented
@dataclasses.dataclass(frozen=True, eq=False)
class Speculation:
    """A few tokens are drafted, and one pass of the target verifies them.

    draft_cost, confidence and rule do not change the distribution of the output.
    Numbers may be traced, and gamma may be one number per row [B]. rule and max_gamma
    are static.

    draft: another model, `PromptLookup()`, or any other `Drafter`. A drafter that has
        parameters is given as `Drafting(drafter, params)`.
    """

    draft: DrafterLike = dataclasses.field(metadata=_UNREPORTED)
    gamma: Array | int = option(
        4,
        "drafts per round (default: 4)",
        flags=("--gamma",),
        within=(0, None),
        type=int,
    )
    rule: str = option(
        "block",
        "block, google and deepmind (two names of one test) sample from the same"
        " distribution as plain decoding, match gives its very tokens; when greedy all"
        " of them do (default: block)",
        flags=("--rule",),
        choices=RULES,
    )
    _: dataclasses.KW_ONLY
    max_gamma: int | None = option(
        None,
        "the largest gamma, on which work and memory depend (default: gamma itself)",
    )
    draft_cost: Array | float | None = option(
        None,
        "time of a draft as a share of a target pass; with it each row drafts as many"
        " of its gamma as pay off at its own acceptance so far",
        within=(0, None),
    )
    confidence: Array | float | None = option(
        None,
        "draft nothing more where the drafter gives no token this probability"
        " (default: 0.2 for heads, 0 for others)",
        flags=("--confidence",),
        within=(0, 1),
        type=float,
        metavar="P",
    )

    name: ClassVar[str] = "speculation"

    def drafting(self) -> Drafting:
        """Returns the drafter and its parameters."""
        return resolve_drafter(self.draft)


@documented
@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """The drafts form a tree: several candidates for the next token, several for the
    token after each candidate, and so on. One pass of the target verifies the whole
    tree.

    With the widths (3, 2, 1) there are 3 candidates for the next token, 2 after each of
    them, and 1 after each of these 6: 15 drafts in all.

    draft: another model, or a head as `draft_from_states` returns it.
    """

    draft: Model | Drafting = dataclasses.field(metadata=_UNREPORTED)
    widths: Sequence[int] = option(
        (3, 2, 1), "children of each node, by depth", within=(1, None)
    )
    rule: str = option(
        "tree",
        "tree samples from the distribution of plain decoding",
        choices=TREE_RULES,
    )

    name: ClassVar[str] = "tree"

    def drafting(self) -> Drafting:
        """Returns the drafter and its parameters."""
        if np.ndim(self.widths) != 1:
            raise UserError(f"widths is {self.widths}; write a list, as (3, 2, 1)")
        if isinstance(self.draft, Drafting):
            return head_tree(self.draft, self.widths)
        if hasattr(self.draft, "draft"):
            name = type(self.draft).__name__
            raise UserError(
                f"{name} makes no trees; give a model or a head as the draft"
            )
        return draft_tree(self.draft, self.widths)


Method: TypeAlias = Plain | Speculation | Tree
