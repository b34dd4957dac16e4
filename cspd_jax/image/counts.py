"""The counts that a sampler keeps of its images, and the result that it returns."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.image.bound import BoundModel, by_position
from cspd_jax.info import Calls, Counts, Generated, Info

Array = jax.Array

# A row of a backbone call is a sequence of tokens. A row of a head call is a denoising
# step of a token.
NETWORKS = ("backbone", "head", "draft backbone", "draft head")


class Trace(NamedTuple):
    """The part of the record of a generation that only images have.

    marks: int8 [B, L] the mark of each position. It is 0 if no draft was tested there,
        k for an accepted draft and -k for a rejected one, where k is the draft's place
        in its round, from 1 on. `Released` always counts k as 1.
    chain_tested: [B] the number of drafted denoising steps that were tested.
    chain_accepted: [B] the number of drafted denoising steps that were kept.
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
    """Returns the images and their record. The first `final` tokens in reveal order are
    generated, and the remaining ones are returned as zeros.

    The record's `tested` and `accepted` [B, gamma] are counted from the marks. Say
    gamma is 2, and the marks of an image are [0, 1, -2, 2]. One draft was tested 1
    group ahead and two were tested 2 groups ahead: `tested` is [1, 2], and `accepted`
    is [1, 1]. A token that is not finite counts as truncated.

    tokens, marks: [B, L + padding, ...] the tokens and their marks in reveal order.
    final: the number of final tokens, one number or [B].
    counts: the counts of the run. Their tested and accepted drafts are denoising steps
        of the target.
    gamma: the number of groups drafted ahead; 0 if none are drafted.
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
    lost = jnp.any(~jnp.isfinite(tokens), axis=2).sum(axis=1, dtype=jnp.int32)
    info = Info(
        made=final - known,
        rounds=counts.rounds,
        tested=by_distance(jnp.abs(marks)),
        accepted=by_distance(marks),
        truncated=jnp.maximum(counts.truncated, lost),
        calls=counts.calls,
        trace=Trace(marks, counts.tested, counts.accepted),
        claim=bound.recipe.claim,
    )
    return Generated(by_position(tokens, order), info)


def no_counts(images: int) -> Counts:
    """Returns the counts of images for which no call was made yet."""
    none = jnp.zeros(images, jnp.int32)
    no_calls = Calls(jnp.int32(0), jnp.int32(0))
    return Counts(none, none, none, none, dict.fromkeys(NETWORKS, no_calls))


def with_calls(counts: Counts, made: dict[str, Calls]) -> Counts:
    """Returns the counts with the calls of some networks, given by name, replaced."""
    return counts._replace(calls=counts.calls | made)


def called(bound: BoundModel, network: str, rows: int, times: int = 1) -> Counts:
    """Returns the counts of `times` calls of one of the `NETWORKS`, made one after the
    other, on `rows` rows each. With guidance they have twice as many rows."""
    times_rows = jnp.int32(times * rows * bound.halves)
    made = Calls(jnp.int32(times), times_rows)
    return with_calls(no_counts(bound.images), {network: made})


def of_chains(counts: Counts, images: int) -> Counts:
    """Adds up the counts of R chains to counts of images. All chains of an image come
    one after the other. The rounds of chains are head calls, and are left out."""
    by_image = lambda a: jnp.sum(a.reshape(images, -1), axis=1, dtype=a.dtype)
    summed = no_counts(images)._replace(
        tested=by_image(counts.tested),
        accepted=by_image(counts.accepted),
        truncated=by_image(counts.truncated),
    )
    return with_calls(summed, counts.calls)


def of_draft(counts: Counts) -> Counts:
    """Returns counts with their calls renamed to calls of the draft model. The drafts
    that were tested along its chains are left out."""
    named = {f"draft {name}": counts.calls[name] for name in ("backbone", "head")}
    nothing = no_counts(len(counts.truncated))
    return with_calls(nothing._replace(truncated=counts.truncated), named)
