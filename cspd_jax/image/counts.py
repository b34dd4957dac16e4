"""What a sampler counts of the images that it makes, and what it returns."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.image.bound import BoundModel, by_position
from cspd_jax.info import Calls, Counts, Generated, Info

Array = jax.Array

# Rows of a backbone are sequences of tokens, rows of a head denoising steps of a token.
NETWORKS = ("backbone", "head", "draft backbone", "draft head")


class Trace(NamedTuple):
    """What images tell beyond what all families do.

    marks: int8 [B, L] by position: 0 for a token of the target's own, k for an
        accepted draft and -k for a rejected one, drafted k groups ahead.
    chain_tested: [B] denoising steps that were tested drafts.
    chain_accepted: [B] those that were kept.
    """

    marks: Array
    chain_tested: Array
    chain_accepted: Array


def generated(
    bound: BoundModel,
    tokens: Array,
    marks: Array,
    final: Array | int,
    counts: Counts,
    gamma: int = 0,
) -> Generated:
    """Returns what there is when the first `final` tokens of each image are, [] or [B]:
    the others are zero.

    tokens, marks: [B, L + padding, ...] in the order of generation.
    counts: what is tested and accepted are denoising steps of the target.
    gamma: groups drafted ahead; 0 if none are.
    """
    length = bound.network.seq_len
    known = 0 if bound.given is None else bound.given.number
    final = jnp.broadcast_to(jnp.maximum(final, known), bound.images)
    there = jnp.arange(length) < final[:, None]
    order = bound.order[: bound.images]
    tokens = jnp.where(there[..., None], tokens[:, :length], 0)
    marks = by_position(jnp.where(there, marks[:, :length], 0), order)
    ahead = jnp.arange(1, gamma + 1, dtype=jnp.int8)
    by_distance = lambda marks: jnp.sum(
        marks[..., None] == ahead, axis=1, dtype=jnp.int32
    )
    info = Info(
        made=final - known,
        rounds=counts.rounds,
        tested=by_distance(jnp.abs(marks)),
        accepted=by_distance(marks),
        truncated=counts.truncated,
        calls=counts.calls,
        trace=Trace(marks, counts.tested, counts.accepted),
        claim=bound.recipe.claim,
    )
    return Generated(by_position(tokens, order), info)


def calls(rows: int, times: int = 1) -> Calls:
    """Counts `times` calls, one after the other, on this many rows each."""
    return Calls(jnp.int32(times), jnp.int32(times * rows))


def no_counts(images: int) -> Counts:
    """Returns the counts of images before anything happened."""
    none = jnp.zeros(images, jnp.int32)
    return Counts(none, none, none, none, {name: calls(0, 0) for name in NETWORKS})


def with_calls(counts: Counts, **made: Calls) -> Counts:
    """Puts calls in the place of those that were counted of these networks."""
    return counts._replace(calls=counts.calls | made)


def backbone_counts(bound: BoundModel, sequences: int) -> Counts:
    """Counts one backbone call on this many sequences."""
    made = calls(sequences * bound.halves)
    return with_calls(no_counts(bound.images), backbone=made)


def head_counts(bound: BoundModel, count: int, rows: int) -> Counts:
    """Counts head calls on this many rows each."""
    made = calls(rows * bound.halves, count)
    return with_calls(no_counts(bound.images), head=made)


def of_chains(counts: Counts, images: int) -> Counts:
    """Adds up by image the counts of chains [R], which come image by image. Head calls
    are no rounds."""
    by_image = lambda a: jnp.sum(a.reshape(images, -1), axis=1, dtype=a.dtype)
    summed = no_counts(images)._replace(
        tested=by_image(counts.tested),
        accepted=by_image(counts.accepted),
        truncated=by_image(counts.truncated),
    )
    return with_calls(summed, **counts.calls)


def of_draft(counts: Counts) -> Counts:
    """Turns counts into the draft model's; the steps that were tested along its chains
    are left out."""
    named = {f"draft {name}": counts.calls[name] for name in ("backbone", "head")}
    nothing = no_counts(len(counts.truncated))
    return with_calls(nothing._replace(truncated=counts.truncated), **named)
