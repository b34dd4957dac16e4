"""The methods of generating images, as objects.

A method is frozen and hashable, and decides which program is compiled. The parameters,
keys and labels are in a `Batch`, next to the method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

from cspd_jax import shell
from cspd_jax._utils.options import documented, option, reported
from cspd_jax.image import released, sampler
from cspd_jax.image.coupled import CoupledCriterion
from cspd_jax.image.criterion import Criterion, PathCriterion
from cspd_jax.image.options import Options
from cspd_jax.image.recipe import Batch
from cspd_jax.image.rounds import Rounds, bound_rounds
from cspd_jax.info import Exactness, Generated
from cspd_jax.models import ImageModel

# Places in a draft are stored as int8.
_GAMMA = (1, 127)


class Method(Protocol):
    """The interface of a method.

    name: the method's name in reports: "plain", "self" or "draft".
    needs_final_noise: True if the method works only with noise in the last denoising
        step, False if it works only without, and None if it works both ways.
    draft: the draft model; None if there is none.
    criterion_name: the name in reports of the test of drafts; None if the method drafts
        no tokens.
    """

    name: ClassVar[str]
    needs_final_noise: ClassVar[bool | None] = None
    draft: Any = None

    @property
    def criterion_name(self) -> str | None:
        return None

    def generate(self, batch: Batch) -> Generated:
        """Makes the images of a batch in a jitted call or two. The function can be
        traced."""

    def stream(self, batch: Batch) -> Iterator[Generated]:
        """Yields the images as they are after each AR step or round, or once."""

    def exactness(self, options: Options) -> Exactness:
        """Returns the claim that the method is, or is not, exact, and the reason. The
        claim does not hold for a run in which draws from a residual were given up."""

    def describe(self) -> dict[str, object] | None:
        """Returns the method's own options for a report; None if it has none."""
        return None


@dataclasses.dataclass(frozen=True)
class Plain(Method):
    """Generates the tokens of one AR step after the other. It is the reference for all
    other methods; with `final_noise` off it is MAR's own sampler."""

    name: ClassVar[str] = "plain"

    def generate(self, batch: Batch) -> Generated:
        return sampler.generate(batch)

    def stream(self, batch: Batch) -> Iterator[Generated]:
        return sampler.stream(batch)

    def exactness(self, options: Options) -> Exactness:
        if options.shortcuts:
            return Exactness(
                False, "; and ".join(shortcut.why for shortcut in options.shortcuts)
            )
        if not options.chains:
            return Exactness(
                True,
                "the plain sampler is the reference itself: every token is drawn from"
                " the target's own distribution",
            )
        return Exactness(
            True,
            "every denoising step is an accepted draft or a draw from the residual;"
            " together they have the target's own distribution",
        )


class _Rounds(Method):
    """The common part of the two methods that speculate over AR steps."""

    needs_final_noise: ClassVar[bool | None] = True
    gamma: int
    draft_cost: float | None
    prefill: float

    @property
    def criterion(self) -> Criterion:
        return PathCriterion()

    @property
    def criterion_name(self) -> str:
        return self.criterion.name

    def rounds(self, batch: Batch) -> Rounds:
        """Returns the rounds that make the images of a batch. Their gamma is at most
        the number of groups that can be drafted."""
        # A target that drafts for itself cannot draft the first group.
        most = len(batch.recipe.groups) - (batch.draft is None)
        gamma = min(self.gamma, max(1, most))
        return bound_rounds(batch, self.criterion, gamma, self.draft_cost, self.prefill)

    def generate(self, batch: Batch) -> Generated:
        return shell.run(self.rounds(batch))

    def stream(self, batch: Batch) -> Iterator[Generated]:
        return shell.stream(self.rounds(batch))

    def exactness(self, options: Options) -> Exactness:
        return self.criterion.exactness()

    def describe(self) -> dict[str, object]:
        names = ("gamma", "draft_cost", "prefill")
        return {
            "criterion": self.criterion_name,
            **{name: getattr(self, name) for name in names},
            **reported(self.criterion),
        }


@documented
@dataclasses.dataclass(frozen=True)
class SelfSpeculation(_Rounds):
    """The target drafts its own next groups and verifies their denoising paths. This is
    exact, and needs no second model."""

    gamma: int = option(
        8,
        "AR steps drafted ahead, at most (default: 8)",
        flags=("--gamma",),
        within=_GAMMA,
        type=int,
    )
    _: dataclasses.KW_ONLY
    draft_cost: float | None = option(
        None,
        "the cost of a drafted AR step as a share of a target's; with it each image"
        " drafts as many as pay off at its acceptance so far",
        flags=("--draft-cost",),
        within=(0, None),
        type=float,
    )
    prefill: float = option(
        0.0,
        "share of the AR steps, at the beginning, that are made without drafts, and one"
        " step more if it is above 0 (default: 0)",
        flags=("--prefill",),
        within=(0, 1),
        type=float,
    )
    coupled: bool = option(
        False,
        "drafts after a rejected one are kept and corrected, still exactly;"
        " saves rounds if gamma is large (default: off)",
        flags=("--coupled",),
        type=bool,
        metavar="on|off",
    )

    name: ClassVar[str] = "self"

    @property
    def criterion(self) -> Criterion:
        return CoupledCriterion() if self.coupled else PathCriterion()


@documented
@dataclasses.dataclass(frozen=True)
class DraftSpeculation(_Rounds):
    """A smaller model drafts the next groups, and the target verifies them.

    draft: the draft model, which makes the same kind of tokens as the target.
    criterion: the test of the drafts. PathCriterion() is exact. PaperCriterion() is
        Algorithm 1 of the paper, and lossy as printed.
    """

    draft: ImageModel = dataclasses.field()  # without a default
    criterion: Criterion = PathCriterion()  # type: ignore[assignment]
    gamma: int = option(8, "as for `SelfSpeculation`", within=_GAMMA)
    draft_cost: float | None = option(
        None, "as for `SelfSpeculation`", within=(0, None)
    )
    prefill: float = option(0.0, "as for `SelfSpeculation`", within=(0, 1))

    name: ClassVar[str] = "draft"


@documented
@dataclasses.dataclass(frozen=True)
class Released(Method):
    """The published implementation of the paper. It is lossy: see `image.released`,
    which also says where its numbers differ from the published ones.

    draft: the draft model, which makes the same kind of tokens as the target.
    inner_temperature: the number by which the distance in the test is divided.
    max_resamples: the most proposals for a block. A rejected token for which none of
        them was taken becomes zero.
    """

    draft: ImageModel = dataclasses.field(metadata={"report": ""})
    gamma: int = option(
        8,
        "the target judges the drafts after each AR step whose number, counted from 0,"
        " is a multiple of gamma, and after the last AR step",
        within=_GAMMA,
    )
    prefill: float = option(
        0.15,
        "the target generates the first AR step, and all those whose number, counted"
        " from 0, is at most this share of the number of AR steps",
        within=(0, 1),
    )
    inner_temperature: float = 42.0
    max_resamples: int = 100

    name: ClassVar[str] = "draft"
    needs_final_noise: ClassVar[bool | None] = False
    criterion_name: ClassVar[str | None] = "released"

    def generate(self, batch: Batch) -> Generated:
        return released.generate(batch, self)

    def stream(self, batch: Batch) -> Iterator[Generated]:
        yield self.generate(batch)

    def exactness(self, options: Options) -> Exactness:
        return Exactness(
            False,
            "the released runner judges drafts in the context before their block, keeps"
            " what follows a rejection, and widens its test: its images do not have the"
            " target's distribution",
        )

    def describe(self) -> dict[str, object]:
        return reported(self)


METHODS = (Plain, SelfSpeculation, DraftSpeculation, Released)
