"""What is to be made (`Job`), and what of it a folder remembers."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax import __version__
from cspd_jax._utils.files import fingerprint
from cspd_jax._utils.typed import check_classes, check_kinds
from cspd_jax.apps.bulk.manifest import KIND, MOST_IMAGES, VERSION, Manifest
from cspd_jax.errors import UserError, check_whole
from cspd_jax.image import pixels
from cspd_jax.image.given import checked_known
from cspd_jax.image.known import Known, in_turn
from cspd_jax.image.methods import Method, Plain
from cspd_jax.image.options import Options
from cspd_jax.image.plan import Plan, check, resolve
from cspd_jax.weights.checks import check_image_model
from cspd_jax.weights.models import VAE, ImageModel


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Images first, ..., first + images - 1 of the run with `seed`. Image i depends on the seed, i, its
    label, the method and the options, up to rounding that depends on the batch.

    model: the target.
    turn: labels, [N]: image i has label i mod N of them.
    images: how many.
    method, options: how images are made.
    first: number of the first one.
    seed: of the key of all images.
    batch: images generated side by side; no more than there are.
    shard_size: images of a file, a multiple of the batch; None is the batch.
    vae: decodes latents; None for models that make pixels, or if tokens are all that is wanted.
    tokens: whether tokens are stored.
    known: tokens that stay, of M pictures: image i begins with those of picture i mod M.
    """

    model: ImageModel
    turn: Sequence[int] | np.ndarray
    images: int
    method: Method = Plain()
    options: Options = Options()
    first: int = 0
    seed: int = 0
    batch: int = 64
    shard_size: int | None = None
    vae: VAE | None = None
    tokens: bool = False
    known: Known | None = None

    def __post_init__(self):
        check_image_model(self.model)
        check_kinds(self)
        check_classes(self, options=Options, known=Known, vae=VAE)
        if self.options.known is not None:
            raise UserError("the options of a job have known tokens; give them to the job itself (known)")
        check_whole("images", self.images, 1, MOST_IMAGES)
        check_whole("first", self.first, 0, MOST_IMAGES - self.images)
        check_whole("seed", self.seed, 0, 2**32 - 1)
        check_whole("batch", self.batch, 1, 2**20)
        object.__setattr__(self, "batch", min(self.batch, self.images))
        if self.shard_size is None:
            object.__setattr__(self, "shard_size", self.batch)
        check_whole("shard_size", self.shard_size, 1, 2**24)
        assert self.shard_size is not None
        if self.shard_size % self.batch:
            most = -(-self.shard_size // self.batch) * self.batch
            raise UserError(
                f"a shard of {self.shard_size} images is not a whole number of batches of {self.batch};"
                f" {most} would be"
            )
        asked = check(self.model, self.turn, self.method, self.options)
        object.__setattr__(self, "turn", asked.labels)
        if self.known is not None:
            if np.ndim(self.known.tokens) != 3 or not len(self.known.tokens):
                raise UserError("the known tokens of a job must be [M, L, d], of at least one picture")
            found = checked_known(self.model, self.known, len(self.known.tokens))
            object.__setattr__(self, "known", found)
        if asked.options.denoise == "auto":
            raise UserError(
                "denoise auto measures, and could decide otherwise on another machine; say plain or"
                " speculative"
            )
        if not image_shape(self.model, self.vae) and not self.tokens:
            raise UserError(
                f"{self.model.name} makes latents; give the autoencoder that turns them into images (--vae),"
                " or store tokens (--tokens)"
            )
        if self.vae is not None:
            pixels.check_vae(self.model, self.vae)

    def labels_of(self, numbers: np.ndarray) -> np.ndarray:
        """int32, of the images with these numbers."""
        return np.asarray(self.turn)[numbers % len(self.turn)]

    def known_of(self, numbers: np.ndarray) -> Known | None:
        """What the images with these numbers begin with."""
        return None if self.known is None else in_turn(self.known, numbers)

    def plan(self) -> Plan:
        """What runs, for one batch. It may fit a drafter, and measures nothing."""
        first = np.arange(self.batch)
        options = dataclasses.replace(self.options, known=self.known_of(first))
        return resolve(self.model, self.labels_of(first), self.method, options)

    def manifest(self, plan: Plan) -> Manifest:
        """All of it as JSON, with fingerprints of the weights."""
        method, draft = plan.method, plan.method.draft_model
        exactness, turn = plan.exactness, np.asarray(self.turn)
        config = self.model.config
        return Manifest(
            format_version=VERSION,
            kind=KIND,
            made_by=__version__,
            target={
                **_identity(self.model.name, config, self.model.params),
                "dtype": jnp.dtype(getattr(self.model.network, "dtype", jnp.float32)).name,
            },
            vae=None if self.vae is None else _identity(self.vae.name, self.vae.config, self.vae.params),
            method={
                **(method.describe() or {}),
                "name": method.name,
                "criterion": method.criterion_name,
                "draft": draft and _identity(draft.name, draft.config, draft.params),
            },
            sampler=plan.options.report(quiet=True) | self._known(),
            seed=self.seed,
            first=self.first,
            images=self.images,
            shard_size=self.shard_size or self.batch,
            batch=self.batch,
            labels={
                "turn": len(turn),
                "listed": not _is_every_class(turn),
                "sha256": hashlib.sha256(turn.astype("<i4").tobytes()).hexdigest(),
            },
            image_shape=image_shape(self.model, self.vae),
            token_shape=(self.model.network.seq_len, self.model.network.token_dim),
            tokens=self.tokens,
            gains_sha256="",
            lossless=exactness.lossless,
            why=exactness.why,
        )

    def _known(self) -> dict[str, Any]:
        if self.known is None:
            return {}
        arrays = (self.known.tokens.astype("<f4"), np.packbits(self.known.mask))
        sha256 = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()
        return {"known": {"pictures": len(self.known.mask), "sha256": sha256}}


def image_shape(model: ImageModel, vae: VAE | None) -> tuple[int, ...]:
    """H, W, C of the images; empty if the model makes latents and there is no autoencoder."""
    config = model.config
    if getattr(config, "vae_stride", None) == 1:
        return (config.image_size, config.image_size, config.latent_channels)
    return () if vae is None else (config.image_size, config.image_size, 3)


def _is_every_class(turn: np.ndarray) -> bool:
    """Whether it is 0, 1, 2, ..., which needs no file."""
    return bool((turn == np.arange(len(turn))).all())


def _identity(name: str, config: Any, params: Any) -> dict[str, Any]:
    return {"name": name, "weights_sha256": fingerprint(config, params)}


def drafters(plan: Plan) -> list[np.ndarray]:
    """The numbers of the drafters of denoising steps. They change which bits come out, not which law."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(_pair(plan))]


def with_drafters(plan: Plan, numbers: list[np.ndarray]) -> Plan:
    """The plan with drafters of these numbers."""
    like, structure = jax.tree.flatten(_pair(plan))
    if [np.shape(a) for a in like] != [a.shape for a in numbers]:
        raise UserError("the gains in the folder are of another model")
    drafter, draft_drafter = jax.tree.unflatten(structure, [jnp.asarray(a) for a in numbers])
    options = dataclasses.replace(plan.options, chain_drafter=drafter, draft_drafter=draft_drafter)
    return dataclasses.replace(plan, options=options)


def _pair(plan: Plan) -> tuple[Any, Any]:
    return plan.options.chain_drafter, plan.options.draft_drafter
