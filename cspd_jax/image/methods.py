"""The ways to generate images, as objects: each checks its options, runs, streams, and judges its exactness.

A method is frozen and hashable. It decides what is compiled; parameters, keys and labels travel beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax._utils.typed import reported
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError, check_range, check_whole, shown
from cspd_jax.image import released, rounds, sampler
from cspd_jax.image.bound import Batch
from cspd_jax.image.counts import BatchOutput, Generated, NetworkCalls, Summary, TokenInfo, chain_info
from cspd_jax.image.exactness import Exactness
from cspd_jax.image.options import Options
from cspd_jax.image.released import RunnerOptions
from cspd_jax.image.rounds import Criterion, Draft, PathCriterion, RoundInfo, TokenSpeculation, total_rows
from cspd_jax.weights.checks import check_draft, check_image_model
from cspd_jax.weights.models import ImageModel

Array = jax.Array
Steps = Iterator[tuple[float, BatchOutput]]


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

    def check(self, model: ImageModel) -> None:
        """UserError for what this method cannot do with this model."""
        ...

    def fitted(self, groups: int) -> Method:
        """This method for a generation of so many groups: no more is drafted than there is."""
        ...

    def chains_per_token(self) -> int:
        """Denoising chains of the target that run side by side for a token of a group."""
        ...

    def run(self, batch: Batch) -> BatchOutput:
        """The batch in one jitted call; traceable."""
        ...

    def steps(self, batch: Batch, pieces: int | None = None) -> Steps:
        """The batch in about so many pieces (default: as small as they come): (known tokens per image, on
        average; what there is, zero elsewhere). The counts are complete at the last one, and may be None
        before."""
        ...

    def summarise(self, options: Options, counts: list[Any], made: Generated) -> Summary:
        """What the counts of all batches amount to."""
        ...

    def exactness(self, options: Options) -> Exactness:
        """Lossless or not, and why; draws that were truncated aside."""
        ...

    def describe(self) -> dict[str, Any] | None:
        """The method's own options, for a report."""
        ...


@dataclasses.dataclass(frozen=True)
class Plain:
    """One AR step after the other: MAR's own sampler, and the reference for all others."""

    name: ClassVar[str] = "plain"
    needs_final_noise: ClassVar[bool | None] = None
    criterion_name: ClassVar[str | None] = None
    draft_model: ClassVar[ImageModel | None] = None

    def check(self, model: ImageModel) -> None:
        pass

    def fitted(self, groups: int) -> Plain:
        return self

    def chains_per_token(self) -> int:
        return 1

    def run(self, batch: Batch) -> BatchOutput:
        return _undrafted(*sampler.sample(*batch))

    def steps(self, batch: Batch, pieces: int | None = None) -> Steps:
        counts = []
        for known, out in sampler.stream(batch, pieces):
            counts.append(out.counts)
            complete = known == batch.network.seq_len
            joined = jax.tree.map(lambda *parts: np.concatenate(parts), *counts) if complete else None
            yield _with_kept(batch, known), _undrafted(out.tokens, joined)

    def summarise(self, options: Options, counts: list[Any], made: Generated) -> Summary:
        """From what is known beforehand, and from the counts [S, ...] where the work varies."""
        segments = sampler.plan_segments(made.length, options)
        steps = [made.steps(groups) for _, groups in segments]
        by_segment = [
            (n * segment.denoising_steps, segment.width) for n, (segment, _) in zip(steps, segments)
        ]
        head_calls, rows = sum(n for n, _ in by_segment), made.batch * (2 if options.guided else 1)
        head_rows, chains = rows * sum(n * width for n, width in by_segment), None  # with padding
        if options.chain is not None:
            joined = jax.tree.map(lambda *parts: np.concatenate(parts), *counts)
            head_calls, head_rows = int(joined.calls.sum()), int(joined.rows.sum())
            chains = chain_info(joined, max(1, made.tokens), max(1, sum(steps)))
        backbone = sum(steps) + made.cached * made.batches
        rounds = made.steps_of_image([group for _, groups in segments for group in groups])
        return Summary(
            rounds, NetworkCalls(backbone, head_calls), NetworkCalls(rows * backbone, head_rows), chains
        )

    def exactness(self, options: Options) -> Exactness:
        if options.shortcuts:
            return Exactness(False, "; and ".join(shortcut.why for shortcut in options.shortcuts))
        if options.chain is None:
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


def _with_kept(batch: Batch, made: Any) -> float:
    """Tokens that an image knows, on average, where those before index `made` ([] or [B]) of its order are
    made; those that were kept count as soon as it begins."""
    known = np.broadcast_to(np.asarray(made), len(batch.labels))
    if batch.options.known is not None:
        known = np.maximum(known, np.asarray(batch.options.known.count))
    return float(np.mean(known if batch.active is None else known[np.asarray(batch.active)]))


def _undrafted(tokens: Array, counts: Any) -> BatchOutput:
    none = jnp.zeros(tokens.shape[:2], bool)
    return BatchOutput(tokens, none, none, counts)


class _Speculation:
    """What both ways of speculating over AR steps share."""

    name: ClassVar[str]
    needs_final_noise: ClassVar[bool | None] = True

    gamma: int
    draft_cost: float | None
    prefill: float
    joint: bool

    @property
    def draft_model(self) -> ImageModel | None:
        return None

    @property
    def speculation(self) -> TokenSpeculation:
        """The static options of the rounds."""
        raise NotImplementedError

    @property
    def criterion_name(self) -> str:
        return self.speculation.criterion.name

    def __post_init__(self) -> None:
        check_whole("gamma", self.gamma, 1)
        check_range("prefill", self.prefill, least=0.0, most=1.0)
        if self.draft_cost is not None:
            check_range("draft_cost", self.draft_cost, above=0.0)

    def check(self, model: ImageModel) -> None:
        self.speculation.criterion.check()

    def run(self, batch: Batch) -> BatchOutput:
        return rounds.sample(*batch, speculation=self.speculation, draft=_draft(self.draft_model))

    def steps(self, batch: Batch, pieces: int | None = None) -> Steps:
        stream = rounds.stream(batch, self.speculation, _draft(self.draft_model), pieces)
        for known, out in stream:
            yield _with_kept(batch, known), out

    def summarise(self, options: Options, counts: list[RoundInfo], made: Generated) -> Summary:
        rounds = np.concatenate([c.rounds for c in counts])[: made.images]
        total = jax.tree.map(lambda *parts: sum(parts), *(c._replace(rounds=c.rounds[:0]) for c in counts))
        networks = (total.target, total.draft)
        chains = None
        if total.chains is not None:
            # A chain that goes on in the middle, where a block ended, counts for the steps that it had left.
            whole = float(np.mean(total.chains.committed))
            chains = chain_info(total.chains, max(1.0, whole), int(total.loop_rounds))
        return Summary(
            rounds=float(rounds.mean()),
            sequential=NetworkCalls(*(int(n) for c in networks for n in (c.backbone, c.head))),
            total=NetworkCalls(*(total_rows(n) for c in networks for n in (c.backbone_rows, c.head_rows))),
            chains=chains,
            verified=TokenInfo(total.tested, total.accepted, int(total.trips), int(total.truncated)),
        )

    def exactness(self, options: Options) -> Exactness:
        if self.joint:
            return Exactness(
                False,
                "all drafts were verified in one context that shows them, which is not each token's own",
            )
        return self.speculation.criterion.exactness()

    def describe(self) -> dict[str, Any]:
        options = reported(self.speculation)
        return {**options, **options["criterion"], "criterion": self.criterion_name}


def _draft(model: ImageModel | None) -> Draft | None:
    return None if model is None else Draft(model.network, model.params)


@dataclasses.dataclass(frozen=True)
class SelfSpeculation(_Speculation):
    """The target drafts its own next groups and verifies their denoising paths. Exact, no second model.

    gamma: most groups drafted ahead.
    draft_cost: None drafts gamma groups always; a number is the cost of a drafted AR step as a share of a
        target's, and each image then drafts as many as pay off at its acceptance so far.
    prefill: above 0, the first 1 + prefill x AR steps come from the target alone.
    joint: verify all groups in one context that shows all drafts: lossy.
    """

    gamma: int = 8
    _: dataclasses.KW_ONLY
    draft_cost: float | None = None
    prefill: float = 0.0
    joint: bool = False

    name: ClassVar[str] = "self"

    @property
    def speculation(self) -> TokenSpeculation:
        return TokenSpeculation(PathCriterion(), self.gamma, self.draft_cost, self.prefill, self.joint)

    def fitted(self, groups: int) -> SelfSpeculation:
        most = max(1, groups - 1)  # the first group is not drafted by itself
        return dataclasses.replace(self, gamma=min(self.gamma, most))

    def chains_per_token(self) -> int:
        return 1 + self.gamma


@dataclasses.dataclass(frozen=True)
class DraftSpeculation(_Speculation):
    """A smaller model drafts the next groups, and the target verifies them.

    draft: the smaller model, of the same tokens.
    criterion: PathCriterion() is exact; PaperCriterion() is Algorithm 1 of the paper, and lossy as printed.
    gamma, draft_cost, prefill, joint: as for `SelfSpeculation`.
    """

    draft: ImageModel
    criterion: Criterion = PathCriterion()
    gamma: int = 8
    draft_cost: float | None = None
    prefill: float = 0.0
    joint: bool = False

    name: ClassVar[str] = "cspd"

    @property
    def draft_model(self) -> ImageModel:
        return self.draft

    @property
    def speculation(self) -> TokenSpeculation:
        return TokenSpeculation(self.criterion, self.gamma, self.draft_cost, self.prefill, self.joint)

    def check(self, model: ImageModel) -> None:
        check_image_model(self.draft, "draft")
        if isinstance(self.criterion, type) or not hasattr(self.criterion, "verify"):
            raise UserError(
                f"criterion is {shown(self.criterion)}; it must be a criterion such as PathCriterion() or"
                " PaperCriterion()"
            )
        super().check(model)
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
    max_resamples: proposals for a block, before a zero is left.
    """

    draft: ImageModel
    gamma: int = 8
    prefill: float = 0.15
    inner_temperature: float = 42.0
    max_resamples: int = 100

    name: ClassVar[str] = "cspd"
    needs_final_noise: ClassVar[bool | None] = False
    criterion_name: ClassVar[str | None] = "official"

    @property
    def draft_model(self) -> ImageModel:
        return self.draft

    @property
    def runner(self) -> RunnerOptions:
        return RunnerOptions(self.gamma, self.prefill, self.inner_temperature, self.max_resamples)

    def check(self, model: ImageModel) -> None:
        check_image_model(self.draft, "draft")
        check_draft(model.config, self.draft.config)
        _ = self.runner  # checks itself

    def fitted(self, groups: int) -> ReleasedRunner:
        return self

    def chains_per_token(self) -> int:
        return 1

    def run(self, batch: Batch) -> BatchOutput:
        draft = Draft(self.draft.network, self.draft.params)
        return released.sample(*batch, runner=released.Runner(self.runner, draft))

    def steps(self, batch: Batch, pieces: int | None = None) -> Steps:
        yield batch.network.seq_len, self.run(batch)

    def summarise(self, options: Options, counts: list[released.RunnerCounts], made: Generated) -> Summary:
        steps = released.schedule(made.length, options.num_iter or made.length, self.runner)
        T = sampling_schedule(str(options.respacing)).num_steps
        rows = made.batch * (1 + bool(options.guided))
        left = made.left([step.group for step in steps])
        each = [released.calls(tuple(itertools.compress(steps, batch)), T) for batch in left]
        calls = NetworkCalls(*(sum(of_batches) for of_batches in zip(*each)))
        drawn = {True: 0, False: 0}  # by whether the draft draws them, with the padding of groups and blocks
        for segment in released.plan_segments(steps, made.length, options.prefix_buckets or 1):
            drawn[segment.drafted] += made.steps([step.group for step in segment.steps]) * segment.width
            judged = [step.group for step in segment.steps if step.block is not None]
            drawn[False] += made.steps(judged) * segment.block
        summed = jax.tree.map(lambda *parts: sum(parts), *counts)
        tested, accepted = summed.tested[:, None], summed.accepted[:, None]
        return Summary(
            rounds=calls.target_backbone / made.batches,
            sequential=calls,
            total=NetworkCalls(
                calls.target_backbone * rows,
                drawn[False] * rows * T,
                calls.draft_backbone * rows,
                drawn[True] * rows * T,
            ),
            verified=TokenInfo(tested, accepted, int(summed.tries.sum()), 0, int(summed.zeros)),
        )

    def exactness(self, options: Options) -> Exactness:
        return Exactness(
            False,
            "the released runner judges drafts in the context before their block, keeps what follows a"
            " rejection, and widens its test: its images do not have the target's distribution",
        )

    def describe(self) -> dict[str, Any]:
        return reported(self.runner)
