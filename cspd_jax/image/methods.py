"""The ways to generate images, as objects.

A method is frozen and hashable. It decides what is compiled; parameters, keys and
labels travel beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import jax

from cspd_jax._utils.options import documented, option, reported
from cspd_jax.check import UserError
from cspd_jax.image import released, rounds, sampler
from cspd_jax.image.counts import Made
from cspd_jax.image.coupled import CoupledCriterion
from cspd_jax.image.options import Options
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.released import RunnerOptions
from cspd_jax.image.rounds import PathCriterion
from cspd_jax.image.state import Criterion, Draft, Speculation
from cspd_jax.info import Exactness
from cspd_jax.models import ImageModel

Array = jax.Array
Steps = Iterator[tuple[Any, Made]]


class Method(Protocol):
    """What `generate` asks of a method.

    name: "plain", "self" or "draft", as reports say it.
    needs_final_noise: True or False if the method works only with or only without noise
        in the last denoising step; None if it works with both.
    """

    name: ClassVar[str]
    needs_final_noise: ClassVar[bool | None] = None

    @property
    def criterion_name(self) -> str | None:
        """How drafts are tested, as reports say it; None if nothing is drafted."""
        return None

    @property
    def draft_model(self) -> ImageModel | None:
        """The smaller model, or None."""
        return None

    @property
    def ahead(self) -> int:
        """Groups drafted ahead, at most; 0 if nothing is drafted."""
        return 0

    def run(
        self,
        network: TokenModel,
        params: Any,
        keys: Array,
        labels: Array,
        options: Options,
    ) -> Made:
        """Generates a batch in one jitted call; traceable. options: settled."""

    def steps(
        self,
        network: TokenModel,
        params: Any,
        keys: Array,
        labels: Array,
        options: Options,
        pieces: int | None = None,
    ) -> Steps:
        """Generates a batch in about so many pieces (as small as they come): yields how
        many tokens are known, [] or [B], and what there is, zero elsewhere."""

    def exactness(self, options: Options) -> Exactness:
        """Says whether it is exact, and why; draws that were given up aside."""

    def describe(self) -> dict[str, Any] | None:
        """Returns the method's own options, for a report."""
        return None


@dataclasses.dataclass(frozen=True)
class Plain(Method):
    """One AR step after the other: MAR's own sampler, and the reference for all
    others."""

    name: ClassVar[str] = "plain"

    def run(
        self,
        network: TokenModel,
        params: Any,
        keys: Array,
        labels: Array,
        options: Options,
    ) -> Made:
        return sampler.sample(network, params, keys, labels, options)

    def steps(self, *batch: Any) -> Steps:
        return sampler.stream(*batch)

    def exactness(self, options: Options) -> Exactness:
        if options.shortcuts:
            return Exactness(
                False, "; and ".join(shortcut.why for shortcut in options.shortcuts)
            )
        if options.chain is None:
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
    """What both ways of speculating over AR steps share."""

    needs_final_noise: ClassVar[bool | None] = True
    gamma: int
    draft_cost: float | None
    prefill: float

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise UserError(f"gamma is {self.gamma}; at least 1 group is drafted ahead")

    @property
    def criterion(self) -> Criterion:
        return PathCriterion()

    @property
    def criterion_name(self) -> str:
        return self.criterion.name

    @property
    def ahead(self) -> int:
        return self.gamma

    def speculation(self, groups: int) -> Speculation:
        """Returns the static options of the rounds of so many groups: no more is
        drafted than there is."""
        # The first group is not drafted by the target itself.
        most = groups - (self.draft_model is None)
        gamma = min(self.gamma, max(1, most))
        return Speculation(self.criterion, gamma, self.draft_cost, self.prefill)

    def _given(self, network: TokenModel, options: Options) -> dict[str, Any]:
        draft = self.draft_model
        return {
            "speculation": self.speculation(len(options.groups(network.seq_len))),
            "draft": None if draft is None else Draft(draft.network, draft.params),
        }

    def run(
        self,
        network: TokenModel,
        params: Any,
        keys: Array,
        labels: Array,
        options: Options,
    ) -> Made:
        return rounds.sample(
            network, params, keys, labels, options, **self._given(network, options)
        )

    def steps(
        self,
        network: TokenModel,
        params: Any,
        keys: Array,
        labels: Array,
        options: Options,
        *pieces: Any,
    ) -> Steps:
        given = self._given(network, options)
        return rounds.stream(network, params, keys, labels, options, *pieces, **given)

    def exactness(self, options: Options) -> Exactness:
        return self.criterion.exactness()

    def describe(self) -> dict[str, Any]:
        own = reported(
            Speculation(self.criterion, self.gamma, self.draft_cost, self.prefill)
        )
        return {**own, **own["criterion"], "criterion": self.criterion_name}


@documented
@dataclasses.dataclass(frozen=True)
class SelfSpeculation(_Rounds):
    """The target drafts its own next groups and verifies their denoising paths. Exact,
    no second model."""

    gamma: int = option(
        8, "AR steps drafted ahead, at most (default: 8)", flags=("--gamma",), type=int
    )
    _: dataclasses.KW_ONLY
    draft_cost: float | None = option(
        None,
        "the cost of a drafted AR step as a share of a target's; with it each image"
        " drafts as many as pay off at its acceptance so far",
        flags=("--draft-cost",),
        type=float,
    )
    prefill: float = option(
        0.0,
        "above 0, the first 1 + PREFILL x AR steps come from the target alone (default:"
        " 0)",
        flags=("--prefill",),
        type=float,
    )
    coupled: bool = option(
        False,
        "on or off: what lies behind a rejected draft is kept, with a new law, in place"
        " of being dropped: fewer rounds where many are drafted (off)",
        flags=("--coupled",),
        type=bool,
        metavar="on|off",
    )

    name: ClassVar[str] = "self"

    @property
    def criterion(self) -> Criterion:
        return CoupledCriterion() if self.coupled else PathCriterion()


@dataclasses.dataclass(frozen=True)
class DraftSpeculation(_Rounds):
    """A smaller model drafts the next groups, and the target verifies them.

    draft: the smaller model, of the same tokens.
    criterion: PathCriterion() is exact; PaperCriterion() is Algorithm 1 of the paper,
        and lossy as printed.
    gamma, draft_cost, prefill: as for `SelfSpeculation`.
    """

    draft: ImageModel
    criterion: Criterion = PathCriterion()  # type: ignore[assignment]
    gamma: int = 8
    draft_cost: float | None = None
    prefill: float = 0.0

    name: ClassVar[str] = "draft"

    @property
    def draft_model(self) -> ImageModel:
        return self.draft


@dataclasses.dataclass(frozen=True)
class Released(Method):
    """The published implementation of the paper, number for number. Lossy: see
    `image.released`.

    draft: the smaller model, of the same tokens.
    gamma, prefill, inner_temperature, max_resamples: as of
        `image.released.RunnerOptions`.
    """

    draft: ImageModel
    gamma: int = 8
    prefill: float = 0.15
    inner_temperature: float = 42.0
    max_resamples: int = 100

    name: ClassVar[str] = "draft"
    needs_final_noise: ClassVar[bool | None] = False
    criterion_name: ClassVar[str | None] = "released"
    # Marks of a token say whether it stayed, not how far it was drafted ahead.
    ahead: ClassVar[int] = 1

    @property
    def draft_model(self) -> ImageModel:
        return self.draft

    @property
    def runner(self) -> RunnerOptions:
        return RunnerOptions(
            self.gamma, self.prefill, self.inner_temperature, self.max_resamples
        )

    def run(
        self,
        network: TokenModel,
        params: Any,
        keys: Array,
        labels: Array,
        options: Options,
    ) -> Made:
        draft = Draft(self.draft.network, self.draft.params)
        return released.sample(
            network, params, keys, labels, options, runner=self.runner, draft=draft
        )

    def steps(self, network: TokenModel, *batch: Any) -> Steps:
        yield network.seq_len, self.run(network, *batch[:4])

    def exactness(self, options: Options) -> Exactness:
        return Exactness(
            False,
            "the released runner judges drafts in the context before their block, keeps"
            " what follows a rejection, and widens its test: its images do not have the"
            " target's distribution",
        )

    def describe(self) -> dict[str, Any]:
        return reported(self.runner)


METHODS = (Plain, SelfSpeculation, DraftSpeculation, Released)
