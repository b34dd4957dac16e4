"""How images are made (`Recipe`), and which images are made (`Batch`).

Both records are pytrees. The fields that decide the compiled program are static. Other
values of the remaining fields, traced values too, compile nothing new.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from chex import ArrayTree

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
    """How B images are made: the `Options`, with nothing left open. Only the claim
    depends on the method.

    The static fields:
    num_iter: the number of AR steps. Some of them may reveal nothing.
    order: the rule by which tokens are revealed.
    groups: [S] the groups of the AR steps that reveal something.
    respacing: the denoising steps that are kept, for example "100".
    respacings: [S] the respacing of each AR step. They differ only with annealing.
    prefixes: the prefix lengths for which the encoder is compiled. Each AR step uses
        the shortest prefix that holds its known tokens.
    chain: the speculation along the denoising chains; None runs them step by step.
    guided: whether there is guidance, for which every image has an unconditional row.
    cfg_schedule: how the guidance scale develops along the AR steps.
    final_noise: whether noise is added in the last denoising step.
    claim: the claim that the images have the plain sampler's distribution, or have not.

    The fields that are data:
    cfg: [B] the guidance scale of each image.
    temperature: [] the factor of the standard deviation of every denoising step.
    drafter: the drafter of the model's denoising steps.
    known: the tokens that stay as they are; None if there are none.
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
    known: Known | None

    @property
    def separate_first(self) -> bool:
        """Whether the conditional and the unconditional half draw a first token each.
        They do so in SphereAR, where the guidance scale of the first token is 1."""
        return self.guided and self.cfg_schedule == RISING

    def report(self) -> dict[str, object]:
        """Returns the recipe as a JSON object, for a report."""
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
    """The draft model of a batch.

    network: its network (static).
    params: its parameters.
    drafter: the drafter of its denoising steps; None for the target's.
    """

    network: TokenModel = dataclasses.field(metadata=STATIC)
    params: ArrayTree | None = None
    drafter: ChainDrafter | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """B images that are to be made.

    network: the network that generates (static).
    method: the method, without its draft model (static).
    params: the parameters of the network.
    keys: [B] the key of each image.
    labels: [B] the class number of each image; -1 is "no class".
    recipe: how the images are made.
    draft: the draft model; None if there is none.
    order: [B, L] the positions in reveal order; None draws them from the keys.
    noise: [T + 1, B or 2B, L, d] the noise of the chains by position; None draws it
        from the keys. There are 2B rows if the two halves of guidance draw a first
        token each (`Recipe.separate_first`).
    """

    network: TokenModel = dataclasses.field(metadata=STATIC)
    method: Any = dataclasses.field(metadata=STATIC)
    params: ArrayTree
    keys: Array
    labels: Array
    recipe: Recipe
    draft: Draft | None = None
    order: Array | None = None
    noise: Array | None = None

    def generate(self) -> Generated:
        """Makes the images. The function can be traced."""
        return self.method.generate(self)

    def stream(self) -> Iterator[Generated]:
        """Yields the images as they are after each AR step or round."""
        return self.method.stream(self)

    def of_draft(self, draft: Draft) -> Batch:
        """Returns the same batch with the draft model in place of the target."""
        recipe = self.recipe
        if draft.drafter is not None:
            recipe = dataclasses.replace(recipe, drafter=draft.drafter)
        return dataclasses.replace(
            self, network=draft.network, params=draft.params, recipe=recipe
        )

    @property
    def missing(self) -> np.ndarray:
        """The number of tokens that each image still lacks, [B]."""
        known = self.recipe.known
        every = np.full(len(self.labels), self.network.seq_len)
        return every if known is None else every - np.sum(known.mask, axis=1)

    def split(self) -> tuple[ArrayTree, Batch]:
        """Splits the batch: returns the fields that have a row for each image, and a
        batch without them."""
        assert self.noise is None, "injected noise is for all images together"
        rows = self.keys, self.labels, self.order, self.recipe.cfg, self.recipe.known
        none: Any = None
        recipe = dataclasses.replace(self.recipe, cfg=none, known=none)
        own = {"keys": none, "labels": none, "order": none}
        return rows, dataclasses.replace(self, **own, recipe=recipe)

    @classmethod
    def joined(cls, rows: ArrayTree, shared: Batch) -> Batch:
        """Makes a batch of the two results of `split`. The rows may belong to fewer
        images."""
        keys, labels, order, cfg, known = rows
        recipe = dataclasses.replace(shared.recipe, cfg=cfg, known=known)
        own = {"keys": keys, "labels": labels, "order": order}
        return dataclasses.replace(shared, **own, recipe=recipe)

    def __getitem__(self, index: np.ndarray) -> Batch:
        """Returns the batch of the images with these numbers."""
        rows, shared = self.split()
        return self.joined(jax.tree.map(lambda a: a[index], rows), shared)
