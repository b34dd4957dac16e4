"""What proposes tokens for the target to verify. Any hashable object with these two functions will do."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from cspd_jax.decoders.text.sampling import Sampling

Array = jax.Array


class Wanted(NamedTuple):
    """What a drafter is asked for.

    tokens [B, max_len], of which the first `length` [B] are final; the drafts go on from there.
    count [B]: how many drafts at most; 0 for rows that need none.
    keys [B]: to be folded with a draft's position for its noise; None when greedy.
    sampling: the law to draw from. stop_ids [S]: nothing needs to be drafted after one of these.
    confidence: None, or a probability: a draft less probable than this should be the row's last.
    most, ids, laws (static): drafts per row, the size of laws, and whether log_q is needed.
    """

    tokens: Array
    length: Array
    count: Array
    keys: Array | None
    sampling: Sampling
    stop_ids: Array
    confidence: Array | None
    most: int
    ids: int
    laws: bool


class Drafts(NamedTuple):
    """tokens [B, most], of which the first `count` [B] are drafts.

    log_q [B, most, ids]: the law that each was drawn from, given those before it. None: each is certain given
    those before it (or laws were not needed).
    passes, rows []: of the network that made them, one after the other, and the tokens in them.

    Whether the row goes on after a draft may depend on that draft and those before it. A draft that was drawn
    is handed over: one that is held back because of what it is would bias the output.
    """

    tokens: Array
    count: Array
    log_q: Array | None
    passes: Array
    rows: Array


class Drafter(Protocol):
    """Pure functions of explicit parameters and of a state, which is any pytree."""

    def begin(self, params: Any, prompts: Array, lengths: Array, max_len: int) -> Any:
        """The state for prompts [B, P] of `lengths` [B] in texts of up to max_len tokens."""

    def draft(self, params: Any, state: Any, wanted: Wanted) -> tuple[Drafts, Any]:
        """Drafts, and the next state. A row's drafts depend on that row alone."""


def no_drafts(batch: int) -> Drafts:
    zero = jnp.int32(0)
    return Drafts(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32), None, zero, zero)


def among(tokens: Array, ids: Array) -> Array:
    """Which of the tokens [...] are one of `ids` [S]."""
    return jnp.any(tokens[..., None] == ids, axis=-1)
