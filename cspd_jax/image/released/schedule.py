"""When the released runner calls which model: decided beforehand, by nothing random."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from cspd_jax.errors import check_range, check_whole
from cspd_jax.image.order import Group, mask_lengths, prefix_lengths


@dataclasses.dataclass(frozen=True)
class RunnerOptions:
    """The static options of the runner.

    gamma: the target judges after AR steps that are multiples of it.
    prefill: up to this share of the AR steps, and in the first, the target generates.
    inner_temperature: divides the distance in the test.
    max_resamples: proposals for a block.
    """

    gamma: int = 8
    prefill: float = 0.15
    inner_temperature: float = 42.0
    max_resamples: int = dataclasses.field(default=100, metadata={"report": "max_tries"})

    def __post_init__(self):
        check_whole("gamma", self.gamma, 1)
        check_range("prefill", self.prefill, least=0.0, most=1.0)
        check_range("inner_temperature", self.inner_temperature, above=0.0)
        check_whole("max_resamples", self.max_resamples, 1)


class ScheduledStep(NamedTuple):
    """An AR step.

    group: what is generated.
    drafted: whether the draft model generates it.
    block: (first index, size) of what is judged after it, or None.
    """

    group: Group
    drafted: bool
    block: tuple[int, int] | None


class RunnerCalls(NamedTuple):
    """Calls made one after the other for a whole batch."""

    target_backbone: int
    target_head: int
    draft_backbone: int
    draft_head: int


class RunnerSegment(NamedTuple):
    """Consecutive steps of one model that run in one `scan`.

    steps: of the segment.
    drafted: whether the draft model generates.
    bucket: length of the encoder's prefix.
    width: what groups are padded to.
    block: what blocks are padded to; 0 where none is judged.
    """

    steps: tuple[ScheduledStep, ...]
    drafted: bool
    bucket: int
    width: int
    block: int


def schedule(length: int, num_iter: int, options: RunnerOptions) -> tuple[ScheduledStep, ...]:
    """All AR steps that reveal something; it depends on nothing random.

    With num_iter > L the steps without tokens count as AR steps, but no model is called: if a block is
    judged after one of them it is so after the last drafted group, in the same context.
    """
    steps: list[ScheduledStep] = []
    known = judged = 0
    for number, masked in enumerate(mask_lengths(length, num_iter)):
        last = number == num_iter - 1
        until = length if last else length - masked
        drafted = number > num_iter * options.prefill
        if until > known:
            steps.append(
                ScheduledStep(Group(known, until - known, (length - masked) / length), drafted, None)
            )
        known = until
        if not drafted:
            judged = known
        elif known > judged and (last or number % options.gamma == 0):
            steps[-1] = steps[-1]._replace(block=(judged, known - judged))
            judged = known
    return tuple(steps)


def calls(steps: tuple[ScheduledStep, ...], denoising_steps: int) -> RunnerCalls:
    """Of a schedule. Each call of a backbone is followed by a chain of T head calls."""
    draft = sum(step.drafted for step in steps)
    target = len(steps) - draft + sum(step.block is not None for step in steps)
    return RunnerCalls(target, target * denoising_steps, draft, draft * denoising_steps)


def plan_segments(
    steps: tuple[ScheduledStep, ...], length: int, prefix_buckets: int
) -> tuple[RunnerSegment, ...]:
    """Cuts where the draft takes over, and where the known tokens outgrow an encoder prefix."""
    prefixes = prefix_lengths(length, prefix_buckets)

    def place(step):
        return step.drafted, next(prefix for prefix in prefixes if prefix >= step.group.start)

    segments = []
    for (drafted, bucket), run in itertools.groupby(steps, place):
        several = tuple(run)
        blocks = [step.block[1] for step in several if step.block]
        width = max(step.group.size for step in several)
        segments.append(RunnerSegment(several, drafted, bucket, width, max(blocks, default=0)))
    return tuple(segments)
