"""What the rounds of speculation over AR steps carry: the options, the constants, the state, the counts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.gaussian import Coefficients
from cspd_jax.image import chain_speculation, plain
from cspd_jax.image.plain import PlainSettings
from cspd_jax.image.protocol import TokenModel
from cspd_jax.image.reveal import reveal_groups

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Ahead:
    """The static options.

    gamma: groups drafted ahead, at most. adapt: None drafts gamma of them always; a number is the time of a
    drafted AR step as a share of a target's, for which each image chooses how many to draft from its own
    acceptance so far. prefill: this share of the groups, and one more, come from the target alone; 0 is none.

    criterion: "path", whole denoising paths (exact), or "paper", the last transition after aligned chains.
    joint: verify all groups in one context that shows all drafts, in place of each group in its own (lossy).

    proposals, max_tries ("path"): K draws from the residual per round and token, and how many there are
    before the last one is kept and counted as truncated (at once where the image diverges).
    sigma, align, inner_temperature, max_trips ("paper"): whether Eq. 5 has its factor Sigma (lossy with it),
    whether both chains share their noise, by how much the test is widened (lossy unless 1), and the limit of
    the resampler's loop.
    """

    gamma: int = 4
    adapt: float | None = None
    prefill: float = 0.0
    criterion: str = "path"
    joint: bool = False
    proposals: int = 8
    max_tries: int = 2**16
    sigma: bool = True
    align: bool = True
    inner_temperature: float = 1.0
    max_trips: int = 64

    def prefilled(self, groups: int) -> int:
        return 1 + int(groups * self.prefill) if self.prefill > 0 else 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Side:
    """A network with what it needs: the target, or the draft."""

    model: TokenModel = dataclasses.field(metadata={"static": True})
    params: Any
    batch: plain.Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Game:
    """What stays the same during a generation.

    draft: None where the target drafts for itself. start, size, scale: [S + gamma + 1] of the groups, with
    some empty ones at the end. steps, c: the denoising chain.
    """

    ahead: Ahead = dataclasses.field(metadata={"static": True})
    settings: PlainSettings = dataclasses.field(metadata={"static": True})
    target: Side
    draft: Side | None
    start: Array
    size: Array
    scale: Array
    c: Coefficients
    temperature: Array

    @property
    def drafter(self) -> Side:
        return self.target if self.draft is None else self.draft

    @property
    def keys(self) -> Array:
        return self.target.batch.keys

    @property
    def length(self) -> int:
        return self.target.model.seq_len

    @property
    def dim(self) -> int:
        return self.target.model.token_dim

    @property
    def steps(self) -> int:
        return self.c.recip.shape[0]

    @property
    def groups(self) -> int:
        return self.start.shape[0] - self.ahead.gamma - 1

    @property
    def width(self) -> int:
        return max(g.size for g in reveal_groups(self.length, self.settings.num_iter))

    @property
    def dtype(self):
        return self.c.recip.dtype


class Paths(NamedTuple):
    """Tokens with their past: states [..., T + 1, d] (entry 0 is the token) and what drew them, z [...,
    H, D] (H = 2 with guidance, conditional first) at guidance `scale` [...], under which they have
    `log_density`."""

    states: Array
    z: Array
    scale: Array
    log_density: Array


class Waiting(NamedTuple):
    """The tokens [B, G] of the group that is being completed.

    missing: [B, G]. z [B, G, H, D], scale [B, G]: the target's law of them. fresh: [B], nothing was drafted:
    the first proposal is taken. q_z, q_scale: the law of the rejected drafts. tries: [B] proposals so far.
    """

    missing: Array
    z: Array
    scale: Array
    fresh: Array
    q_z: Array
    q_scale: Array
    tries: Array


# Rows are counted in two numbers, of so many and of one: a long generation has more than int32 holds.
_MANY = 2**20


class Work(NamedTuple):
    """Calls of a network one after the other, and the rows in them [2]: contexts, and denoising steps."""

    backbone: Array
    backbone_rows: Array
    head: Array
    head_rows: Array


class Counts(NamedTuple):
    """tested, accepted: [S, gamma] drafted tokens, by AR step and by distance. rounds: [B], until the image
    was complete. calls: [], rounds of the loop. target, draft: calls of the networks. trips: [] of
    resampling: rounds in which an image drew from residuals ("path", summed over images), or trips of the
    loop ("paper"). truncated: [] residual draws that were given up. chains: of speculation along the target's
    denoising chains, if there was any."""

    tested: Array
    accepted: Array
    rounds: Array
    calls: Array
    target: Work
    draft: Work
    trips: Array
    truncated: Array
    chains: chain_speculation.Counts | None


class State(NamedTuple):
    """tokens: [B, L + padding, d] in reveal order, final before group `group` [B] (and in it, where
    nothing is missing). drafts: [B, gamma, G] of the groups from `group` on, or, while tokens are
    missing, of those after; drafted: [B], whether there are any. window: [B], how many of them are used.
    tested, accepted: [B, L + padding], tokens that were tested drafts, and those that passed.
    """

    tokens: Array
    group: Array
    drafts: Paths
    drafted: Array
    window: Array
    waiting: Waiting
    tested: Array
    accepted: Array
    counts: Counts


def add_work(old: Work, *more: Work) -> Work:
    total = jax.tree.map(lambda *numbers: functools.reduce(jnp.add, numbers), old, *more)
    return total._replace(backbone_rows=_carried(total.backbone_rows), head_rows=_carried(total.head_rows))


def _carried(rows: Array) -> Array:
    return jnp.stack([rows[0] + rows[1] // _MANY, rows[1] % _MANY])


def _work(backbone: Any = 0, backbone_rows: Any = 0, head: Any = 0, head_rows: Any = 0) -> Work:
    def rows(n):
        return jnp.stack([jnp.int32(n // _MANY), jnp.int32(n % _MANY)])

    return Work(jnp.int32(backbone), rows(backbone_rows), jnp.int32(head), rows(head_rows))


def no_work() -> Work:
    return _work()


def backbone_work(game: Game, sequences: int) -> Work:
    return _work(backbone=1, backbone_rows=sequences * (1 + game.settings.guided))


def head_work(game: Game, calls: int, rows: int) -> Work:
    return _work(head=calls, head_rows=rows * (1 + game.settings.guided))


def chains_work(counts: chain_speculation.Counts) -> Work:
    return _work(head=counts.calls, head_rows=counts.rows)


def total_rows(rows) -> int:
    """How many rows a `Work` has counted."""
    return int(rows[0]) * _MANY + int(rows[1])
