"""What a sampler says of the images it made, and the `Info` of it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.image.chain import ChainCounts
from cspd_jax.info import Calls, Exactness, Info

Array = jax.Array


class Work(NamedTuple):
    """What a model did for B images; it adds up over AR steps and rounds.

    backbone: calls of the backbone; a row is a sequence of tokens.
    head: calls of the head; a row is one denoising step of a token.
    chain_tested: [B] denoising steps that were tested drafts.
    chain_accepted: [B] those that were kept.
    truncated: [B] draws from a residual that were given up.
    """

    backbone: Calls
    head: Calls
    chain_tested: Array
    chain_accepted: Array
    truncated: Array


class Counts(NamedTuple):
    """What happened in an AR step, a round, or all of them: it adds up.

    rounds: [B] that the image took part in.
    target: what the target did.
    draft: what the draft model did.
    """

    rounds: Array
    target: Work
    draft: Work


class Made(NamedTuple):
    """B images of L tokens as they come from a sampler, by position.

    tokens: [B, L, d]
    marks: int8 [B, L] 0 for a token of the target's own, k for an accepted draft and -k
        for a rejected one, drafted k groups ahead.
    counts: what it took.
    """

    tokens: Array
    marks: Array
    counts: Counts


class ImageTrace(NamedTuple):
    """What an `Info` tells of images besides: the `marks` of `Made`, and [B] what
    speculation along the chains did, as in `Work`."""

    marks: Array
    chain_tested: Array
    chain_accepted: Array


def info_of(made: Made, judgement: Exactness, gamma: int, known: Array | None) -> Info:
    """Returns what happened. gamma: groups drafted ahead; 0 if none are. known: [B, L]
    tokens it began with."""
    counts = made.counts
    length = made.marks.shape[1]
    target = counts.target
    draft = counts.draft
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
        truncated=target.truncated + draft.truncated,
        calls={
            "backbone": target.backbone,
            "head": target.head,
            "draft backbone": draft.backbone,
            "draft head": draft.head,
        },
        trace=ImageTrace(made.marks, target.chain_tested, target.chain_accepted),
        judgement=judgement,
    )


def no_work(images: int) -> Work:
    """Returns the work of so many images before anything happened."""
    none = jnp.zeros(images, jnp.int32)
    return Work(calls(0, 0), calls(0, 0), none, none, none)


def no_counts(images: int) -> Counts:
    """Returns the counts of so many images before anything happened."""
    return Counts(jnp.zeros(images, jnp.int32), no_work(images), no_work(images))


def calls(rows: int, times: int = 1) -> Calls:
    """Counts `times` calls, one after the other, on so many rows each."""
    return Calls(jnp.int32(times), jnp.int32(times * rows))


def chain_work(counts: ChainCounts, images: int) -> Work:
    """Adds up by image the counts of chains [R], which come image by image."""
    by_image = (
        jnp.sum(a.reshape(images, -1), axis=1, dtype=a.dtype) for a in counts[2:]
    )
    return Work(calls(0, 0), counts.head, *by_image)


def add_up(*parts):
    """Adds up several records of what happened."""
    return jax.tree.map(lambda *numbers: sum(numbers[1:], numbers[0]), *parts)
