"""The ways to generate images, as objects: each checks its options, runs, streams, and judges its exactness.

A method is frozen and hashable. It decides what is compiled; parameters, keys and labels travel beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError, check_range, check_whole
from cspd_jax.image import released, rounds, sampler
from cspd_jax.image.info import BatchOutput, Info, NetworkCalls, TokenInfo, chain_info
from cspd_jax.image.released import RunnerOptions
from cspd_jax.image.rounds import Criterion, Exactness, PathCriterion, RoundInfo, TokenSpeculation, total_rows
from cspd_jax.weights.models import ImageModel, check_draft, check_image_model

if TYPE_CHECKING:
    from cspd_jax.image.plan import Plan

Array = jax.Array


class Method(Protocol):
    """What `generate` asks of a method.

    name: "plain", "self" or "cspd", as reports say it.
    criterion_name: how drafts are tested, as reports say it; None if nothing is drafted.
    needs_final_noise: True or False if the method works only with or only without noise in the last denoising
        step; None if it works with both.
    draft_model: the smaller model, or None.
    """

    name: ClassVar[str]
    needs_final_noise: ClassVar[bool | None]

    @property
    def criterion_name(self) -> str | None: ...

    @property
    def draft_model(self) -> ImageModel | None: ...

    def check(self, model: ImageModel, settings: sampler.SamplerSettings) -> None:
        """UserError for what this method cannot do with this model."""
        ...

    def fitted(self, groups: int) -> Method:
        """This method for a generation of so many groups: no more is drafted than there is."""
        ...

    def chains_per_token(self) -> int:
        """Denoising chains of the target that run side by side for a token of a group."""
        ...

    def run(self, plan: Plan, keys: Array, labels: Array, active: Array | None = None) -> BatchOutput:
        """A batch in one jitted call; traceable. active: [B] images that are wanted (all)."""
        ...

    def steps(
        self, plan: Plan, keys: Array, labels: Array, active: Array | None = None
    ) -> Iterator[tuple[float, BatchOutput]]:
        """A batch step by step: (known tokens per image, on average; what there is, zero elsewhere). The
        counts are complete at the last step, and may be None before."""
        ...

    def summarise(self, plan: Plan, counts: list[Any]) -> dict[str, Any]:
        """rounds, sequential, total, chains and verified of `Info`, from the counts of all batches."""
        ...

    def exactness(self, info: Info) -> Exactness:
        """Lossless or not, and why; draws that were given up aside."""
        ...

    def describe(self) -> dict[str, Any] | None:
        """The options, for a report."""
        ...


@dataclasses.dataclass(frozen=True)
class Plain:
    """One AR step after the other: MAR's own sampler, and the reference for all others."""

    name: ClassVar[str] = "plain"
    needs_final_noise: ClassVar[bool | None] = None
    criterion_name: ClassVar[str | None] = None
    draft_model: ClassVar[ImageModel | None] = None

    def check(self, model: ImageModel, settings: sampler.SamplerSettings) -> None:
        pass

    def fitted(self, groups: int) -> Plain:
        return self

    def chains_per_token(self) -> int:
        return 1

    def run(self, plan: Plan, keys: Array, labels: Array, active: Array | None = None) -> BatchOutput:
        out = sampler.sample(
            plan.model.network, plan.model.params, keys, labels,
            **plan.common, drafter=plan.drafter, active=active,
        )  # fmt: skip
        return _undrafted(out.tokens, out.counts)

    def steps(
        self, plan: Plan, keys: Array, labels: Array, active: Array | None = None
    ) -> Iterator[tuple[float, BatchOutput]]:
        counts = []
        for known, out in sampler.stream(
            plan.model.network, plan.model.params, keys, labels,
            **plan.common, drafter=plan.drafter, active=active,
        ):  # fmt: skip
            counts.append(out.counts)
            complete = known == plan.model.network.seq_len
            stacked = jax.tree.map(lambda *parts: np.stack(parts), *counts) if complete else None
            yield known, _undrafted(out.tokens, stacked)

    def summarise(self, plan: Plan, counts: list[Any]) -> dict[str, Any]:
        """From what is known beforehand, and from the counts [S, ...] where the work varies."""
        settings, length, batches = plan.settings, plan.model.network.seq_len, len(counts)
        segments = sampler.plan_segments(length, settings)
        rounds = sum(len(segment.groups) for segment in segments)
        by_segment = [(len(s.groups) * s.denoising_steps, s.width) for s in segments]
        calls, drawn = (
            sum(n for n, _ in by_segment),
            sum(n * width for n, width in by_segment),
        )  # with padding
        rows = batches * plan.batch * (2 if settings.guided else 1)
        head_calls, head_rows, chains = batches * calls, rows * drawn, None
        if settings.chain is not None:
            joined = jax.tree.map(lambda *parts: np.concatenate(parts), *counts)
            head_calls, head_rows = int(joined.calls.sum()), int(joined.rows.sum())
            chains = chain_info(joined, len(plan.request.labels) * length, len(joined.calls))
        return {
            "rounds": rounds,
            "sequential": NetworkCalls(batches * rounds, head_calls),
            "total": NetworkCalls(rows * rounds, head_rows),
            "chains": chains,
            "verified": None,
        }

    def exactness(self, info: Info) -> Exactness:
        if shortcuts := info.plan.settings.shortcuts:
            return Exactness(False, "; and ".join(shortcut.why for shortcut in shortcuts))
        if info.plan.settings.chain is None:
            return Exactness(
                True,
                "the plain sampler is the reference itself: every token is drawn from the target's own"
                " distribution",
            )
        return Exactness(
            True,
            "every denoising step is an accepted draft or a draw from the residual; together they have the"
            " target's own distribution",
        )

    def describe(self) -> None:
        return None


def _undrafted(tokens: Array, counts: Any) -> BatchOutput:
    none = jnp.zeros(tokens.shape[:2], bool)
    return BatchOutput(tokens, none, none, counts)


class _Speculation:
    """What both ways of speculating over AR steps share."""

    name: ClassVar[str]
    needs_final_noise: ClassVar[bool | None] = True

    gamma: int
    adapt: float | None
    prefill: float
    joint: bool

    @property
    def draft_model(self) -> ImageModel | None:
        return None

    @property
    def options(self) -> TokenSpeculation:
        """The static options of the rounds."""
        raise NotImplementedError

    @property
    def criterion_name(self) -> str:
        return self.options.criterion.name

    def check(self, model: ImageModel, settings: sampler.SamplerSettings) -> None:
        check_whole("gamma", self.gamma, 1)
        check_range("prefill", self.prefill, least=0.0, most=1.0)
        if self.adapt is not None:
            check_range("adapt", self.adapt, above=0.0)
        self.options.criterion.check()

    def run(self, plan: Plan, keys: Array, labels: Array, active: Array | None = None) -> BatchOutput:
        network, params = plan.model.network, plan.model.params
        out = rounds.sample(network, params, keys, labels, **self._arguments(plan), active=active)
        return BatchOutput(*out)

    def steps(
        self, plan: Plan, keys: Array, labels: Array, active: Array | None = None
    ) -> Iterator[tuple[float, BatchOutput]]:
        network, params = plan.model.network, plan.model.params
        wanted = slice(None) if active is None else np.asarray(active)
        stream = rounds.stream(network, params, keys, labels, **self._arguments(plan), active=active)
        for known, out in stream:
            yield float(np.mean(np.asarray(known)[wanted])), BatchOutput(*out)

    def _arguments(self, plan: Plan) -> dict[str, Any]:
        arguments = {**plan.common, "speculation": self.options, "drafter": plan.drafter}
        if self.draft_model is not None:
            arguments |= {"draft": self.draft_model.network, "draft_params": self.draft_model.params}
            arguments["draft_drafter"] = plan.draft_drafter
        return arguments

    def summarise(self, plan: Plan, counts: list[RoundInfo]) -> dict[str, Any]:
        rounds = np.concatenate([c.rounds for c in counts])[: len(plan.request.labels)]
        total = jax.tree.map(lambda *parts: sum(parts), *(c._replace(rounds=c.rounds[:0]) for c in counts))
        networks = (total.target, total.draft)
        chains = None
        if total.chains is not None:
            count = max(1, int(total.chains.starts[-1]))  # every chain begins at the last step, once
            chains = chain_info(total.chains, count, int(total.loop_rounds))
        return {
            "rounds": float(rounds.mean()),
            "sequential": NetworkCalls(*(int(n) for c in networks for n in (c.backbone, c.head))),
            "total": NetworkCalls(*(total_rows(n) for c in networks for n in (c.backbone_rows, c.head_rows))),
            "chains": chains,
            "verified": TokenInfo(total.tested, total.accepted, int(total.trips), int(total.truncated)),
        }

    def exactness(self, info: Info) -> Exactness:
        if self.joint:
            return Exactness(
                False,
                "all drafts were verified in one context that shows them, which is not each token's own",
            )
        return self.options.criterion.exactness(info)

    def describe(self) -> dict[str, Any]:
        options = dataclasses.asdict(self.options)
        return {**options, **options["criterion"], "criterion": self.criterion_name}


@dataclasses.dataclass(frozen=True)
class SelfSpeculation(_Speculation):
    """The target drafts its own next groups and verifies their whole denoising paths. Exact, no second model.

    gamma: most groups drafted ahead.
    proposals: draws from the residual per round.
    adapt: None drafts gamma groups always; a number is the cost of a drafted AR step as a share of a
        target's, and each image then drafts as many as pay off at its acceptance so far.
    prefill: above 0, the first 1 + prefill x AR steps come from the target alone.
    joint: verify all groups in one context that shows all drafts: lossy.
    """

    gamma: int = 8
    proposals: int = 16
    adapt: float | None = None
    prefill: float = 0.0
    joint: bool = False

    name: ClassVar[str] = "self"

    @property
    def options(self) -> TokenSpeculation:
        criterion = PathCriterion(self.proposals)
        return TokenSpeculation(criterion, self.gamma, self.adapt, self.prefill, self.joint)

    def fitted(self, groups: int) -> SelfSpeculation:
        most = max(1, groups - 1)  # the first group is not drafted by itself
        return dataclasses.replace(self, gamma=min(self.gamma, most))

    def chains_per_token(self) -> int:
        return self.proposals + self.gamma


@dataclasses.dataclass(frozen=True)
class DraftSpeculation(_Speculation):
    """A smaller model drafts the next groups, and the target verifies them.

    draft: the smaller model, of the same tokens.
    criterion: PathCriterion() is exact; PaperCriterion() is Algorithm 1 of the paper, and lossy as printed.
    gamma, adapt, prefill, joint: as for `SelfSpeculation`.
    """

    draft: ImageModel
    criterion: Criterion = PathCriterion()
    gamma: int = 8
    adapt: float | None = None
    prefill: float = 0.0
    joint: bool = False

    name: ClassVar[str] = "cspd"

    @property
    def draft_model(self) -> ImageModel:
        return self.draft

    @property
    def options(self) -> TokenSpeculation:
        return TokenSpeculation(self.criterion, self.gamma, self.adapt, self.prefill, self.joint)

    def check(self, model: ImageModel, settings: sampler.SamplerSettings) -> None:
        check_image_model(self.draft, "draft")
        if isinstance(self.criterion, type) or not hasattr(self.criterion, "verify"):
            raise UserError(
                f"criterion is {self.criterion!r}; it must be a criterion object such as PathCriterion() or"
                " PaperCriterion()"
            )
        super().check(model, settings)
        check_draft(model.config, self.draft.config)

    def fitted(self, groups: int) -> DraftSpeculation:
        return dataclasses.replace(self, gamma=min(self.gamma, max(1, groups)))

    def chains_per_token(self) -> int:
        return self.criterion.chains_per_token(self.gamma)


@dataclasses.dataclass(frozen=True)
class ReleasedRunner:
    """The published implementation of the paper, number for number. Lossy: see `image.released`.

    draft: the smaller model, of the same tokens.
    gamma: the target judges after AR steps that are multiples of it.
    prefill: up to this share of the AR steps, and in the first, the target generates.
    inner_temperature: divides the distance in the test.
    max_tries: of proposals for a block, before a zero is left.
    """

    draft: ImageModel
    gamma: int = 8
    prefill: float = 0.15
    inner_temperature: float = 42.0
    max_tries: int = 100

    name: ClassVar[str] = "cspd"
    needs_final_noise: ClassVar[bool | None] = False
    criterion_name: ClassVar[str | None] = "official"

    @property
    def draft_model(self) -> ImageModel:
        return self.draft

    @property
    def options(self) -> RunnerOptions:
        return RunnerOptions(self.gamma, self.prefill, self.inner_temperature, self.max_tries)

    def check(self, model: ImageModel, settings: sampler.SamplerSettings) -> None:
        check_draft(model.config, self.draft.config)
        _ = self.options  # checks itself

    def fitted(self, groups: int) -> ReleasedRunner:
        return self

    def chains_per_token(self) -> int:
        return 1

    def run(self, plan: Plan, keys: Array, labels: Array, active: Array | None = None) -> BatchOutput:
        out = released.sample(
            plan.model.network, plan.model.params, self.draft.network, self.draft.params, keys, labels,
            **plan.common, options=self.options, active=active,
        )  # fmt: skip
        return BatchOutput(*out)

    def steps(
        self, plan: Plan, keys: Array, labels: Array, active: Array | None = None
    ) -> Iterator[tuple[float, BatchOutput]]:
        yield plan.model.network.seq_len, self.run(plan, keys, labels, active)

    def summarise(self, plan: Plan, counts: list[released.RunnerCounts]) -> dict[str, Any]:
        settings, length = plan.settings, plan.model.network.seq_len
        steps = released.schedule(length, settings.num_iter, self.options)
        T = sampling_schedule(settings.respacing).num_steps
        calls = released.calls(steps, T)
        rows = plan.batch * (1 + settings.guided)
        drawn = {True: 0, False: 0}  # by whether the draft draws them, with the padding of groups and blocks
        for segment in released.plan_segments(steps, length, settings.prefix_buckets):
            drawn[segment.drafted] += len(segment.steps) * segment.width
            drawn[False] += sum(step.block is not None for step in segment.steps) * segment.block
        total = NetworkCalls(
            calls.target_backbone * rows,
            drawn[False] * rows * T,
            calls.draft_backbone * rows,
            drawn[True] * rows * T,
        )
        batches, summed = len(counts), jax.tree.map(lambda *parts: sum(parts), *counts)
        return {
            "rounds": float(calls.target_backbone),
            "sequential": NetworkCalls(*(n * batches for n in calls)),
            "total": NetworkCalls(*(n * batches for n in total)),
            "chains": None,
            "verified": TokenInfo(
                summed.tested[:, None],
                summed.accepted[:, None],
                int(summed.tries.sum()),
                0,
                int(summed.zeros),
            ),
        }

    def exactness(self, info: Info) -> Exactness:
        return Exactness(
            False,
            "the released runner judges drafts in the context before their block, keeps what follows a"
            " rejection, and widens its test: its images do not have the target's distribution",
        )

    def describe(self) -> dict[str, Any]:
        return dataclasses.asdict(self.options)
