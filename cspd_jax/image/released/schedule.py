"""When the released runner calls which model: decided beforehand, by nothing random."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from cspd_jax.errors import UserError
from cspd_jax.image.reveal import Group, mask_lengths


@dataclasses.dataclass(frozen=True)
class Official:
    """gamma: the target judges after AR steps that are multiples of it. prefill: up to this share of the AR
    steps, and in the first, the target generates. max_tries: of proposals for a block."""

    gamma: int = 4
    prefill: float = 0.15
    inner_temperature: float = 42.0
    max_tries: int = 100

    def __post_init__(self):
        if self.gamma < 1:
            raise UserError(f"gamma is {self.gamma}; it must be at least 1")
        if not 0 <= self.prefill <= 1:
            raise UserError(f"prefill is {self.prefill}; it is a share of the AR steps, from 0 to 1")
        if not self.inner_temperature > 0:
            raise UserError(f"the inner temperature is {self.inner_temperature}; it must be above 0")
        if self.max_tries < 1:
            raise UserError(f"max_tries is {self.max_tries}; it must be at least 1")


class Step(NamedTuple):
    """An AR step: who generates the group, and the block (first index, size) that is judged after it."""

    group: Group
    drafted: bool
    block: tuple[int, int] | None


class Calls(NamedTuple):
    """Calls made one after the other for a whole batch."""

    target_backbone: int
    target_head: int
    draft_backbone: int
    draft_head: int


class Segment(NamedTuple):
    """Consecutive steps of one model that run in one `scan`: encoder prefix `bucket`, groups padded to
    `width`, blocks to `block` (0: none is judged)."""

    steps: tuple[Step, ...]
    drafted: bool
    bucket: int
    width: int
    block: int


def schedule(length: int, num_iter: int, official: Official) -> tuple[Step, ...]:
    """All AR steps that reveal something; it depends on nothing random.

    With num_iter > L the steps without tokens count as AR steps, but no model is called: if a block is
    judged after one of them it is so after the last drafted group, in the same context.
    """
    steps: list[Step] = []
    known = judged = 0
    for number, masked in enumerate(mask_lengths(length, num_iter)):
        last = number == num_iter - 1
        until = length if last else length - masked
        drafted = number > num_iter * official.prefill
        if until > known:
            steps.append(Step(Group(known, until - known, (length - masked) / length), drafted, None))
        known = until
        if not drafted:
            judged = known
        elif known > judged and (last or number % official.gamma == 0):
            steps[-1] = steps[-1]._replace(block=(judged, known - judged))
            judged = known
    return tuple(steps)


def calls(steps: tuple[Step, ...], denoising_steps: int) -> Calls:
    """Of a schedule. Each call of a backbone is followed by a chain of T head calls."""
    draft = sum(step.drafted for step in steps)
    target = len(steps) - draft + sum(step.block is not None for step in steps)
    return Calls(target, target * denoising_steps, draft, draft * denoising_steps)


def plan_segments(steps: tuple[Step, ...], length: int, encoder_sizes: int) -> tuple[Segment, ...]:
    """Cuts where the draft takes over, and where the known tokens outgrow an encoder prefix."""
    unit = -(-length // encoder_sizes)

    def place(step):
        return step.drafted, min(length, unit * max(1, -(-step.group.start // unit)))

    segments = []
    for (drafted, bucket), several in itertools.groupby(steps, place):
        several = tuple(several)
        blocks = [step.block[1] for step in several if step.block]
        width = max(step.group.size for step in several)
        segments.append(Segment(several, drafted, bucket, width, max(blocks, default=0)))
    return tuple(segments)
