"""Requests for images, and the running batch that they are rows of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from cspd_jax.image.known import Known
from cspd_jax.image.methods import Plain, SelfSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.plan import check
from cspd_jax.image.rounds.pool import ImagePool, ImageProgress, PoolImage
from cspd_jax.weights.models import ImageModel


class Prompt(NamedTuple):
    """A text to make an image of.

    ids: of all that comes before the image.
    negative: those that guidance is measured from.
    """

    text: str
    ids: tuple[int, ...]
    negative: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ImageRequest:
    """One image.

    label: class number; -1 is "no class"; 0 with a prompt.
    seed: the image is that of `generate(jax.random.key(seed), model, [label], ...)`.
    cfg: guidance scale; 1 is none.
    method: "self" or "plain".
    known: tokens [L, d] that stay, by a mask [L]; None is none.
    prompt: of a model that makes images from text.
    """

    label: int
    seed: int = 0
    cfg: float = 1.0
    method: str = "self"
    known: Known | None = None
    prompt: Prompt | None = None

    @property
    def lane(self) -> str:
        return lane_name(self.method, self.cfg != 1)


def lane_name(method: str, guided: bool) -> str:
    return f"image-{method}{'-guided' if guided else ''}"


class ImageRows:
    """The running batch of one method, with guidance or without: a `Lane` of the engine.

    rows: B
    """

    def __init__(self, model: ImageModel, rows: int, method: SelfSpeculation | Plain, guided: bool):
        options = Options(**{**model.sampling, "cfg": 2.0 if guided else 1.0, "final_noise": True})
        plan = check(model, [-1], method, options)
        speculation = plan.method.speculation if isinstance(plan.method, SelfSpeculation) else None
        self.rows = rows
        self._pool = ImagePool(model.network, model.params, rows, plan.options, speculation)
        self.leave, self.advance = self._pool.leave, self._pool.advance
        self.reset, self.warm = self._pool.reset, self._pool.warm

    def enter(self, requests: Mapping[int, ImageRequest]) -> None:
        """Images into these rows, which must be empty."""
        self._pool.enter({row: PoolImage(r.label, r.seed, r.cfg, r.known) for row, r in requests.items()})


__all__ = ["ImageProgress", "ImageRequest", "ImageRows", "Prompt", "lane_name"]
