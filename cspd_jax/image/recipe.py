"""What is settled before images are made: how (`Recipe`), and which (`Batch`).

Both are pytrees. What decides the compiled program is static; the rest may be replaced
by other numbers, traced ones too, and compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from cspd_jax._utils.options import reported
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.chain_drafters import ChainDrafter
from cspd_jax.image.known import Known
from cspd_jax.image.order import RISING, Group, Order
from cspd_jax.image.protocol import TokenModel
from cspd_jax.info import Exactness, Generated

Array = jax.Array
STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recipe:
    """How B images are made, whatever the method: `Options` with nothing left open.

    Static:
    num_iter: AR steps that were asked for; some may reveal nothing.
    order: the rule by which tokens are revealed.
    groups: [S] of the AR steps that reveal something.
    respacing: which denoising steps there are.
    respacings: [S] of each AR step; the same but where they are annealed.
    prefixes: lengths that the encoder is compiled for; each AR step has the shortest
        that will do.
    chain: speculation along the denoising chains; None runs them step by step.
    guided: whether an unconditional half runs.
    cfg_schedule: how the guidance scale develops along the AR steps.
    final_noise: whether the last denoising step has noise.
    claim: whether the distribution is the plain sampler's, and why.

    Data:
    cfg: [B] guidance scale.
    temperature: [] of the denoising noise.
    drafter: drafts denoising steps.
    draft_drafter: drafts denoising steps of the draft model.
    known: tokens that stay; None where nothing is known.
    """

    num_iter: int = dataclasses.field(metadata=STATIC)
    order: Order = dataclasses.field(metadata=STATIC)
    groups: tuple[Group, ...] = dataclasses.field(metadata=STATIC)
    respacing: str = dataclasses.field(metadata=STATIC)
    respacings: tuple[str, ...] = dataclasses.field(metadata=STATIC)
    prefixes: tuple[int, ...] = dataclasses.field(metadata=STATIC)
    chain: ChainSpeculation | None = dataclasses.field(metadata=STATIC)
    guided: bool = dataclasses.field(metadata=STATIC)
    cfg_schedule: str = dataclasses.field(metadata=STATIC)
    final_noise: bool = dataclasses.field(metadata=STATIC)
    claim: Exactness = dataclasses.field(metadata=STATIC)
    cfg: Array | np.ndarray
    temperature: Array | float
    drafter: ChainDrafter
    draft_drafter: ChainDrafter
    known: Known | None

    @property
    def separate_first(self) -> bool:
        """Whether the halves of guidance draw their first tokens apart, as SphereAR's
        do: its scale is 1."""
        return self.guided and self.cfg_schedule == RISING

    def report(self) -> dict[str, Any]:
        """Returns what was settled, as JSON."""
        chosen = ("num_iter", "respacing", "cfg_schedule", "final_noise", "guided")
        return {
            **{name: getattr(self, name) for name in chosen},
            "denoise": "plain" if self.chain is None else reported(self.chain),
            "order": {"name": self.order.name, **reported(self.order)},
            "prefix_buckets": len(self.prefixes),
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """A smaller model that drafts: its network (static) and its parameters."""

    network: TokenModel = dataclasses.field(metadata=STATIC)
    params: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """B images that are to be made.

    network: static.
    method: which way, without its draft model (static).
    keys: [B] one for each image.
    labels: [B] class numbers; -1 is "no class".
    recipe: how they are made, whatever the method.
    draft: the smaller model, if one drafts.
    order: [B, L] positions, in place of those that the keys give.
    noise: [T + 1, B, L, d] of the chains by position, in place of what the keys give
        ([T + 1, 2B, L, d] where the halves draw first tokens apart).
    """

    network: TokenModel = dataclasses.field(metadata=STATIC)
    method: Any = dataclasses.field(metadata=STATIC)
    params: Any
    keys: Array
    labels: Array
    recipe: Recipe
    draft: Draft | None = None
    order: Array | None = None
    noise: Array | None = None

    def generate(self) -> Generated:
        """Makes the images; traceable."""
        return self.method.generate(self)

    def stream(self) -> Iterator[Generated]:
        """Yields what there is after each step or round."""
        return self.method.stream(self)

    def of_draft(self, draft: Draft) -> Batch:
        """Returns the same images for the draft model."""
        recipe = dataclasses.replace(self.recipe, drafter=self.recipe.draft_drafter)
        return dataclasses.replace(
            self, network=draft.network, params=draft.params, recipe=recipe
        )

    @property
    def missing(self) -> np.ndarray:
        """Counts the tokens that are to be drawn of each image, [B]."""
        known = self.recipe.known
        every = np.full(len(self.labels), self.network.seq_len)
        return every if known is None else every - np.sum(known.mask, axis=1)

    def split(self) -> tuple[Any, Batch]:
        """Returns what is by image, and the batch without it."""
        assert self.noise is None, "injected noise is for all images together"
        rows = self.keys, self.labels, self.order, self.recipe.cfg, self.recipe.known
        none: Any = None
        recipe = dataclasses.replace(self.recipe, cfg=none, known=none)
        own = {"keys": none, "labels": none, "order": none}
        return rows, dataclasses.replace(self, **own, recipe=recipe)

    @classmethod
    def joined(cls, rows: Any, shared: Batch) -> Batch:
        """Undoes `split`, with the rows of some images."""
        keys, labels, order, cfg, known = rows
        recipe = dataclasses.replace(shared.recipe, cfg=cfg, known=known)
        own = {"keys": keys, "labels": labels, "order": order}
        return dataclasses.replace(shared, **own, recipe=recipe)

    def __getitem__(self, index: np.ndarray) -> Batch:
        """Returns the images with these numbers."""
        rows, shared = self.split()
        return self.joined(jax.tree.map(lambda a: a[index], rows), shared)
