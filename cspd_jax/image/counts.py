"""What a sampler counts of the images it makes, and the `Info` of it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.info import Calls, Counts, Exactness, Info

Array = jax.Array

# Rows of a backbone are sequences of tokens, rows of a head denoising steps of a token.
NETWORKS = ("backbone", "head", "draft backbone", "draft head")


class Made(NamedTuple):
    """B images of L tokens as they come from a sampler, by position.

    tokens: [B, L, d]
    marks: int8 [B, L] 0 for a token of the target's own, k for an accepted draft and -k
        for a rejected one, drafted k groups ahead.
    counts: what it took; what is tested and accepted are the target's denoising steps.
    """

    tokens: Array
    marks: Array
    counts: Counts


class Trace(NamedTuple):
    """What images tell beyond what all families do.

    marks: as of `Made`.
    chain_tested: [B] denoising steps that were tested drafts.
    chain_accepted: [B] those that were kept.
    """

    marks: Array
    chain_tested: Array
    chain_accepted: Array


def info_of(made: Made, claim: Exactness, gamma: int, known: Array | None) -> Info:
    """Returns what happened.

    gamma: groups drafted ahead; 0 if none are.
    known: [B, L] tokens it began with.
    """
    counts = made.counts
    length = made.marks.shape[1]
    ahead = jnp.arange(1, gamma + 1, dtype=jnp.int8)
    by_distance = lambda marks: jnp.sum(
        marks[..., None] == ahead, axis=1, dtype=jnp.int32
    )
    given = 0 if known is None else jnp.sum(known, axis=1, dtype=jnp.int32)
    return Info(
        made=jnp.full_like(counts.rounds, length) - given,
        rounds=counts.rounds,
        tested=by_distance(jnp.abs(made.marks)),
        accepted=by_distance(made.marks),
        truncated=counts.truncated,
        calls=counts.calls,
        trace=Trace(made.marks, counts.tested, counts.accepted),
        claim=claim,
    )


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
