"""What an experiment is made for: the pair of models, and how much of everything."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cspd_jax import __version__
from cspd_jax._utils.files import weights_sha256
from cspd_jax.apps.evaluation.features import FeatureNetwork
from cspd_jax.apps.evaluation.reference import Reference
from cspd_jax.apps.paper.cells import Cell
from cspd_jax.errors import UserError, check_whole
from cspd_jax.image.order import reveal_groups
from cspd_jax.weights.checks import check_draft
from cspd_jax.weights.models import DEFAULTS, VAE, ImageModel

_EMBEDDED_STEPS = "ddim25"  # of the embedded pair, a quarter of its own


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """The models, and the sizes of the experiments.

    target, draft: the pair; without a draft only ways that need none are run.
    vae: decodes latents; without one no pictures are made of them.
    images: of each row; None is the experiment's own number.
    batches: images side by side, of table 1; the largest is that of the other experiments.
    gammas: AR steps drafted ahead.
    num_iter: AR steps; None is one per token.
    steps: respacing of the denoising steps; None is the model's own.
    seed: of all keys.
    inception, against: for FID; None is the domain's own features.
    """

    target: ImageModel
    draft: ImageModel | None = None
    vae: VAE | None = None
    images: int | None = None
    batches: tuple[int, ...] = (1, 8)
    gammas: tuple[int, ...] = (4, 8, 32)
    num_iter: int | None = None
    steps: str | None = None
    seed: int = 0
    inception: FeatureNetwork | None = None
    against: Reference | None = None

    def __post_init__(self):
        if not self.batches or not self.gammas:
            raise UserError("batches and gammas must each hold at least one number")
        for batch in self.batches:
            check_whole("a batch", batch, 1, 2**20)
        most = self.ar_steps - 1
        for gamma in self.gammas:
            if gamma > most:
                raise UserError(
                    f"gamma {gamma} is too large: {self.target.name} makes an image in {most + 1} AR steps,"
                    f" so at most {most} can be drafted ahead (--gamma)"
                )
            check_whole("gamma", gamma, 1)
        if self.images is not None:
            check_whole("images", self.images, 1, 2**24)
        if self.draft is not None:
            check_draft(self.target.config, self.draft.config)

    @property
    def ar_steps(self) -> int:
        """AR steps of an image that reveal something."""
        length = self.target.network.seq_len
        return len(reveal_groups(length, length if self.num_iter is None else self.num_iter))

    @property
    def pair(self) -> str:
        return self.target.name if self.draft is None else f"{self.target.name} and {self.draft.name}"

    @property
    def side(self) -> int:
        """Images side by side where the batch is not what is studied."""
        return max(self.batches)

    @property
    def least(self) -> int:
        return min(self.gammas)

    @property
    def middle(self) -> int:
        """The gamma of experiments that study something else: the second smallest."""
        return sorted(self.gammas)[min(1, len(self.gammas) - 1)]

    def gammas_of(self, way: Mapping[str, Any]) -> tuple[int, ...]:
        """The gammas that a way is run with. A draft model drafts anew after every rejection, but for the
        released runner: for time, such ways have the two smallest."""
        several = way.get("method") == "cspd" and way.get("criterion") != "official"
        return tuple(sorted(self.gammas)[: 2 if several else None])

    @functools.cached_property
    def models(self) -> dict[str, str]:
        """What a cell's outcome depends on besides the cell."""
        found = {"version": __version__, "device": jax.devices()[0].device_kind}
        for role, model in (("target", self.target), ("draft", self.draft)):
            if model is not None:
                dtype = jnp.dtype(getattr(model.network, "dtype", jnp.float32)).name
                found[role] = weights_sha256(f"{model.config!r} {dtype}", model.params)
        return found

    def cell(self, options: Mapping[str, Any], *, images: int | None = None, **more: Any) -> Cell:
        """A cell with the seed and the denoising steps of this setup."""
        more = {"seed": self.seed, "steps": self.steps} | more
        of_all = {} if self.num_iter is None else {"num_iter": self.num_iter}
        return Cell({**of_all, **options}, images=images or self.side, **more)

    def cells(self, options: Mapping[str, Any], images: int, **more: Any) -> list[Cell]:
        """As many images as are wanted of each row (`images` unless the setup says), in whole batches."""
        wanted = self.images or images
        return [self.cell(options, first=i, **more) for i in range(0, wanted, self.side)]


def default_steps(target: str) -> str | None:
    """The respacing without --steps: for the embedded models fewer steps, which take minutes."""
    return _EMBEDDED_STEPS if target in DEFAULTS else None
