"""Ways to continue texts, as objects. All of them have one distribution, that of
`Plain()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import jax

from cspd_jax._utils.options import documented, option
from cspd_jax.check import UserError
from cspd_jax.language_models import Model
from cspd_jax.text.drafters import (
    DrafterLike,
    Drafting,
    PromptLookup,
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
    """One token after the other: the reference."""

    name: ClassVar[str] = "plain"


@documented
@dataclasses.dataclass(frozen=True, eq=False)
class Speculation:
    """A few tokens are drafted, and verified in one pass of the target.

    Neither draft_cost nor confidence changes the distribution of the output, and no
    rule does. Numbers may be traced; gamma may be one number for each row [B]. The rule
    and max_gamma are static.

    draft: another model, `PromptLookup()`, or any `Drafter`; `Drafting(drafter,
        params)` for one that has parameters.
    """

    draft: DrafterLike = dataclasses.field(metadata=_UNREPORTED)
    gamma: Array | int = option(
        4,
        "drafts per round (default: 4; with --method auto 2 or 4)",
        flags=("--gamma",),
        type=int,
    )
    rule: str = option(
        "block",
        "block and google sample from the same distribution as plain decoding, match"
        " gives its very tokens; when greedy all of them do (default: block)",
        flags=("--rule",),
        choices=tuple(RULES),
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
    )
    confidence: Array | float | None = option(
        None,
        "draft nothing more where the drafter gives no token a probability of P"
        " (default: 0.2 for heads, 0 for others)",
        flags=("--confidence",),
        type=float,
        metavar="P",
    )

    name: ClassVar[str] = "speculation"

    def drafting(self) -> Drafting:
        """Returns the drafter and its parameters."""
        if self.rule not in RULES:
            names = ", ".join(RULES)
            raise UserError(f"rule is {self.rule}; it must be one of {names}")
        return resolve_drafter(self.draft)


@documented
@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """Candidates for the next token, and for those after each, are verified in one pass
    of the target.

    draft: another model, or a head as `draft_from_states` returns it.
    """

    draft: Model | Drafting = dataclasses.field(metadata=_UNREPORTED)
    widths: Sequence[int] = option((3, 2, 1), "children of each node, by depth")
    rule: str = option("tree", "tree samples from the distribution of plain decoding")

    name: ClassVar[str] = "tree"

    def drafting(self) -> Drafting:
        """Returns the drafter and its parameters."""
        if self.rule not in TREE_RULES:
            names = ", ".join(TREE_RULES)
            raise UserError(f"rule is {self.rule}; it must be one of {names}")
        if isinstance(self.draft, PromptLookup):
            raise UserError("look-up makes no trees; give a model as the draft")
        if isinstance(self.draft, Drafting):
            return head_tree(self.draft, self.widths)
        return draft_tree(self.draft, self.widths)


Method: TypeAlias = Plain | Speculation | Tree
