"""What the rounds of token speculation work on: the options, the inputs, the state, and what happened."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from cspd_jax.diffusion.gaussian import Gaussian
from cspd_jax.image.bound import BoundModel
from cspd_jax.image.chain.speculation import ChainCounts, no_counts
from cspd_jax.image.exactness import Exactness
from cspd_jax.image.options import Options
from cspd_jax.image.protocol import TokenModel

Array = jax.Array


class Criterion(Protocol):
    """How the tokens that a draft model drafted are tested, and what replaces them. Frozen and hashable.

    name: as reports say it.
    """

    name: ClassVar[str]

    def check(self) -> None:
        """UserError for options that cannot be."""
        ...

    def chains_per_token(self, gamma: int) -> int:
        """Denoising chains of the target that run side by side for a token of a group."""
        ...

    def draft_keys(self, inputs: Inputs, state: SpeculationState) -> Array:
        """[B] of the noise that a draft model draws with."""
        ...

    def verify(self, inputs: Inputs, state: SpeculationState) -> tuple[SpeculationState, RoundInfo]:
        """A round but for a draft model's drafts: tests them, and completes the group where those that are
        kept end."""
        ...

    def exactness(self) -> Exactness:
        """Lossless or not, and why."""
        ...


@dataclasses.dataclass(frozen=True)
class TokenSpeculation:
    """The static options of speculation over AR steps. See `image.methods` for what they mean to a user.

    criterion: how a drafted token is tested, and what replaces it.
    gamma: most groups drafted ahead.
    draft_cost: None drafts gamma groups always; a number is the cost of a drafted AR step as a share of a
        target's, and each image then drafts as many as pay off at its acceptance so far.
    prefill: this share of the groups, and one more, come from the target alone; 0 is none.
    joint: verify all groups in one context that shows all drafts, instead of each in its own (lossy).
    """

    criterion: Criterion
    gamma: int = 8
    draft_cost: float | None = dataclasses.field(default=None, metadata={"report": "adapt"})
    prefill: float = 0.0
    joint: bool = False

    def prefilled(self, groups: int) -> int:
        return 1 + int(groups * self.prefill) if self.prefill > 0 else 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """A smaller model that drafts.

    network: static.
    params: pytree of arrays.
    """

    network: TokenModel = dataclasses.field(metadata={"static": True})
    params: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What stays the same during a generation.

    speculation: the options (static).
    target: verifies.
    draft: drafts; None where the target drafts for itself.
    start: [S + gamma + 1] first index of each group in reveal order; the last gamma + 1 groups are empty.
    size: [S + gamma + 1] tokens in each group.
    scale: [S + gamma + 1, B] guidance scale.
    """

    speculation: TokenSpeculation = dataclasses.field(metadata={"static": True})
    target: BoundModel
    draft: BoundModel | None
    start: Array
    size: Array
    scale: Array

    @property
    def options(self) -> Options:
        return self.target.options

    @property
    def keys(self) -> Array:
        return self.target.keys

    @property
    def images(self) -> int:
        return self.target.images

    @property
    def length(self) -> int:
        return self.target.network.seq_len

    @property
    def dim(self) -> int:
        return self.target.network.token_dim

    @property
    def steps(self) -> int:
        return self.target.steps

    @property
    def groups(self) -> int:
        return self.start.shape[0] - self.speculation.gamma - 1

    @property
    def prefilled(self) -> int:
        """Groups that come from the target alone."""
        return self.speculation.prefilled(self.groups)

    @property
    def width(self) -> int:
        return max(g.size for g in self.options.groups(self.length))

    @property
    def dtype(self) -> Any:
        return self.target.dtype


class Paths(NamedTuple):
    """Tokens with their denoising paths, and what drew them.

    states: [..., T + 1, d] entry 0 is the token, entry T is noise.
    laws: [..., T, d] the Gaussian that entry i of the states was drawn from.
    """

    states: Array
    laws: Gaussian


class SpeculationState(NamedTuple):
    """What a round starts from.

    tokens: [B, L + padding, d] in reveal order; final before group `group`.
    group: [B] the group that comes next.
    drafts: [B, gamma, G] of the groups from `group` on.
    num_drafts: [B] how many of them are used.
    tested: [B, L + padding] tokens that were tested drafts.
    accepted: [B, L + padding] drafts that passed.
    """

    tokens: Array
    group: Array
    drafts: Paths
    num_drafts: Array
    tested: Array
    accepted: Array


# Rows are counted in two numbers, of so many and of one: a long generation has more than int32 holds.
_CARRY = 2**20


class CallCounts(NamedTuple):
    """Calls of one network, one after the other, and the rows in them.

    backbone: [] calls; a row is a sequence of tokens.
    backbone_rows: [2]
    head: [] calls; a row is one denoising step of a token.
    head_rows: [2]
    """

    backbone: Array
    backbone_rows: Array
    head: Array
    head_rows: Array


class RoundInfo(NamedTuple):
    """What happened in a step, in a round, or in all rounds: they add up.

    tested: [S, gamma] drafted tokens that were tested, by AR step and by distance.
    accepted: [S, gamma] those that passed.
    rounds: [B] rounds until the image was complete.
    loop_rounds: [] rounds of the loop.
    target: calls of the target.
    draft: calls of the draft model.
    trips: [] iterations of the loop that draws from residuals.
    truncated: [] residual draws that were truncated.
    chains: speculation along the target's denoising chains; None without.
    """

    tested: Array
    accepted: Array
    rounds: Array
    loop_rounds: Array
    target: CallCounts
    draft: CallCounts
    trips: Array
    truncated: Array
    chains: ChainCounts | None


def round_info(inputs: Inputs, **happened) -> RoundInfo:
    """Nothing happened but what is given."""
    table = jnp.zeros((inputs.groups, inputs.speculation.gamma), jnp.int32)
    none, chains = jnp.int32(0), None
    if inputs.options.chain is not None:
        chains = no_counts(inputs.steps)
    rounds = jnp.zeros(inputs.images, jnp.int32)
    nothing = RoundInfo(table, table, rounds, none, call_counts(), call_counts(), none, none, chains)
    return nothing._replace(**happened)


def add_up(*infos: RoundInfo) -> RoundInfo:
    total = jax.tree.map(lambda *numbers: functools.reduce(jnp.add, numbers), *infos)
    return total._replace(target=_carried(total.target), draft=_carried(total.draft))


def call_counts(backbone: Any = 0, backbone_rows: Any = 0, head: Any = 0, head_rows: Any = 0) -> CallCounts:
    def rows(n):
        return jnp.stack([jnp.int32(n // _CARRY), jnp.int32(n % _CARRY)])

    return CallCounts(jnp.int32(backbone), rows(backbone_rows), jnp.int32(head), rows(head_rows))


def add_calls(*counts: CallCounts) -> CallCounts:
    return _carried(jax.tree.map(lambda *numbers: functools.reduce(jnp.add, numbers), *counts))


def _carried(counts: CallCounts) -> CallCounts:
    def carried(rows):
        return jnp.stack([rows[0] + rows[1] // _CARRY, rows[1] % _CARRY])

    return counts._replace(backbone_rows=carried(counts.backbone_rows), head_rows=carried(counts.head_rows))


def backbone_calls(inputs: Inputs, sequences: int) -> CallCounts:
    """One call on so many sequences."""
    return call_counts(backbone=1, backbone_rows=sequences * (1 + bool(inputs.options.guided)))


def head_calls(inputs: Inputs, calls: int, rows: int) -> CallCounts:
    """Calls on so many rows together."""
    return call_counts(head=calls, head_rows=rows * (1 + bool(inputs.options.guided)))


def total_rows(rows) -> int:
    """How many rows a `CallCounts` has counted."""
    return int(rows[0]) * _CARRY + int(rows[1])
