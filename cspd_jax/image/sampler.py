"""The plain sampler, which generates one group of tokens after the other. Without
`final_noise` it draws from the distribution of MAR's `sample_tokens`.

The denoising chains of a group run step by step, or with speculation along them
(`chain.speculate_chain`), which draws from the same distribution.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax._utils.compilation import outermost_jit
from cspd_jax.check import UserError
from cspd_jax.diffusion.chain import Chains, sample_chain
from cspd_jax.image.bound import BoundModel, bind, embed_time
from cspd_jax.image.chain import not_begun, speculate_chain
from cspd_jax.image.counts import (
    called,
    generated,
    no_counts,
    of_chains,
)
from cspd_jax.image.known import put_back
from cspd_jax.image.lossy import Checkerboard
from cspd_jax.image.order import Group, guidance_scale
from cspd_jax.image.protocol import CachedTokenModel, CausalTokenModel
from cspd_jax.image.recipe import Batch, Recipe
from cspd_jax.info import Counts, Generated, add
from cspd_jax.keys import Purpose, purpose_keys

Array = jax.Array
# A function that draws the tokens of a group: (network, z [B', G, D], positions [B, G],
# used [B, G], guidance scale [B]) -> (tokens [B, G, d], its report on the step). A
# token that is not `used` may have any value.
Draw = Callable[[BoundModel, Array, Array, Array, Array], tuple[Array, ArrayTree]]


class PlainState(NamedTuple):
    """The state that one AR step passes to the next.

    tokens: [B, L + padding, d] the tokens in reveal order. The tokens before the next
        group are final.
    cache: the context cache of a `CachedTokenModel`; None for other models.
    uncond_first: [B, d] the first token of each image as the unconditional half sees
        it; None unless the two halves of guidance draw a first token each.
    """

    tokens: Array
    cache: ArrayTree | None = None
    uncond_first: Array | None = None


class Segment(NamedTuple):
    """The static values of a segment: AR steps that run in one `scan`.

    bucket: the length of the encoder's prefix.
    width: the number G of tokens to which every group is padded.
    respacing: the denoising steps that are kept.
    separate_first: whether the two halves of guidance draw tokens of their own.
    """

    bucket: int
    width: int
    respacing: str
    separate_first: bool = False


class GroupArrays(NamedTuple):
    """The groups of AR steps as arrays. A `scan` over S steps takes arrays [S]; a
    single step sees scalars.

    start: [...] the index of the group's first token in reveal order.
    size: [...] the number of tokens in the group.
    scale: [..., B] the guidance scale of each image.
    """

    start: Array
    size: Array
    scale: Array


def plan_segments(
    length: int, recipe: Recipe
) -> list[tuple[Segment, tuple[Group, ...]]]:
    """Cuts the AR steps into segments with static shapes and little padding. A new
    segment begins where the known tokens outgrow an encoder prefix, where the denoising
    steps change, between the two colours of a checkerboard, and after a first token
    that the halves of guidance draw apart.

    With L = 8 and the prefixes (4, 8), four groups make two segments:

        groups (start, size)      bucket  width
        (0, 1), (1, 2), (3, 2)    4       2
        (5, 3)                    8       3
    """
    board = recipe.order
    first = board.of_first_colour(length) if isinstance(board, Checkerboard) else length
    members: dict[tuple[int, str, bool, bool], list[Group]] = {}
    for group, respacing in zip(recipe.groups, recipe.respacings):
        bucket = next(prefix for prefix in recipe.prefixes if prefix >= group.start)
        apart = recipe.separate_first and group.start == 0
        kind = (bucket, respacing, group.start >= first, apart)
        members.setdefault(kind, []).append(group)
    return [
        (
            Segment(bucket, max(g.size for g in groups), respacing, apart),
            tuple(groups),
        )
        for (bucket, respacing, _, apart), groups in members.items()
    ]


def ar_step(
    bound: BoundModel,
    segment: Segment,
    state: PlainState,
    group: GroupArrays,
    draw: Draw | None = None,
) -> tuple[PlainState, ArrayTree]:
    """Generates the group of one AR step, padded to the segment's width. The next group
    overwrites the padding.

    Returns the next state, and the report of `draw` (default: `draw_tokens`) on the
    step.
    """
    z, positions, cache = group_context(bound, segment, state, group.start)
    # The unconditional half draws a group of its own, and neither half is guided.
    if segment.separate_first:
        bound = both_halves(bound)
        positions = jnp.tile(positions, (2, 1))
    used = jnp.broadcast_to(jnp.arange(segment.width) < group.size, positions.shape)
    if bound.given is not None:
        missing = group.start + jnp.arange(segment.width) >= bound.given.number[:, None]
        used &= jnp.tile(missing, (len(used) // len(missing), 1))
    x, seen = (draw or draw_tokens)(bound, z, positions, used, group.scale)
    x = bound.network.finish(x) if isinstance(bound.network, CausalTokenModel) else x
    first = state.uncond_first
    if segment.separate_first:
        x, first = (
            x[: len(state.tokens)],
            x[len(state.tokens) :, 0].astype(state.tokens.dtype),
        )
        first = put_back(bound.given, first[:, None])[:, 0]
        seen = jax.tree.map(
            lambda a: a.reshape(2, -1).sum(axis=0, dtype=a.dtype) if a.ndim else a, seen
        )
    tokens = write_group(state.tokens, x, group.start)
    return PlainState(put_back(bound.given, tokens), cache, first), seen


def both_halves(bound: BoundModel) -> BoundModel:
    """Returns the model with its two halves as 2B images without guidance. The images
    of the unconditional half have keys of their own."""
    keys = jnp.concatenate(
        [bound.keys, purpose_keys(bound.keys, Purpose.UNCONDITIONAL)]
    )
    recipe = dataclasses.replace(bound.recipe, guided=False)
    return dataclasses.replace(bound, keys=keys, recipe=recipe)


def group_context(
    bound: BoundModel, segment: Segment, state: PlainState, start: Array
) -> tuple[Array, Array, ArrayTree | None]:
    """Reads the contexts of the group that begins at index `start`. Returns z [B', G,
    D], the positions [B, G] of the group's tokens, and the cache.

    All tokens before `start` are known. An index past the last token is replaced by the
    index of the last token.
    """
    network = bound.network
    images = len(state.tokens)
    rows = len(bound.order)
    index = jnp.minimum(start + jnp.arange(segment.width), network.seq_len - 1)
    index = jnp.broadcast_to(index, (rows, segment.width))
    known = jnp.full(rows, start)
    if bound.given is not None:
        known = jnp.maximum(known, jnp.tile(bound.given.number, rows // images))
    tokens = jnp.tile(state.tokens[:, : network.seq_len], (rows // images, 1, 1))
    if state.uncond_first is not None:
        tokens = tokens.at[images:, 0].set(state.uncond_first)
    arguments = (tokens, bound.order, known, bound.class_embedding, index)
    cache = state.cache
    if isinstance(network, CachedTokenModel):
        z, cache = network.extend(
            bound.params, cache, *arguments, bucket=segment.bucket
        )
    else:
        z = network.context(bound.params, *arguments, bucket=segment.bucket)
    if z.ndim != 3 or z.shape[:2] != index.shape:
        raise UserError(
            f"context returned {list(z.shape)}; it must be [rows, tokens, D] for rows"
            f" and tokens {list(index.shape)}"
        )
    return z, jnp.take_along_axis(bound.order[:images], index[:images], axis=1), cache


def write_group(tokens: Array, x: Array, start: Array) -> Array:
    """Writes x [B, G, ...] into tokens [B, L + padding, ...] from index `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(
        tokens, x.astype(tokens.dtype), start, axis=1
    )


def draw_tokens(
    bound: BoundModel, z: Array, positions: Array, used: Array, scale: Array
) -> tuple[Array, Counts]:
    """Draws the tokens [B, G, d] of a group, by plain chains or by speculation along
    the chains. Returns them with the counts of the AR step, its backbone call included.
    """
    shape = positions.shape
    chains = group_chains(bound, z, scale)
    if bound.recipe.chain is None:
        x = sample_chain(chains, bound.chain_noise(positions))
        return x.reshape(*shape, -1), step_counts(bound, positions.size)
    drafter = bound.recipe.drafter
    left = jnp.where(used.reshape(-1), bound.steps, 0)
    begun = not_begun(drafter, bound.initial_noise(positions), left)
    keys = bound.window_keys(positions)
    x, made = speculate_chain(chains, keys, begun, drafter, bound.recipe.chain)
    counts = add(of_chains(made, shape[0]), called(bound, "backbone", shape[0]))
    return x.reshape(*shape, -1), counts


def step_counts(bound: BoundModel, tokens: int) -> Counts:
    """Counts the calls of an AR step in which the chains of this many tokens run step
    by step: one backbone call, and T head calls."""
    head = called(bound, "head", tokens, times=bound.steps)
    return add(called(bound, "backbone", bound.images), head)


def group_chains(bound: BoundModel, z: Array, scale: Array) -> Chains:
    """Returns the chains of the tokens of a group.

    z: [B', G, D] the contexts of the tokens.
    scale: [B] the guidance scale of each image.
    """
    scale = jnp.repeat(scale, z.shape[1])[:, None]
    return bound.chains(z.reshape(-1, z.shape[-1]), scale)


def ar_steps(
    bound: BoundModel, segment: Segment, state: PlainState, groups: GroupArrays
) -> tuple[PlainState, Counts]:
    """Makes the S AR steps of a segment, one after the other. Returns the state after
    them, and their counts."""
    if segment.respacing != bound.recipe.respacing:
        bound = dataclasses.replace(
            bound,
            time=embed_time(bound.network, bound.params, segment.respacing),
            recipe=dataclasses.replace(bound.recipe, respacing=segment.respacing),
        )
    step = functools.partial(ar_step, bound, segment)
    return take_ar_steps(bound, step, state, groups)


def take_ar_steps(
    bound: BoundModel,
    step: Callable[..., tuple[ArrayTree, ArrayTree]],
    state: ArrayTree,
    groups: GroupArrays,
    *more: ArrayTree,
) -> tuple[ArrayTree, ArrayTree]:
    """Calls step(state, group, ...) -> (state, counts) for each of the S groups, one
    after the other. Returns the last state and the sum of the counts.

    A step is skipped if every image knows all tokens of its group.
    """

    def nothing(*given: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
        _, seen = jax.eval_shape(step, *given)
        return given[0], jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), seen)

    def maybe(state: ArrayTree, inputs: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
        if bound.given is None:
            return step(state, *inputs)
        needed = jnp.any(bound.given.number < inputs[0].start + inputs[0].size)
        return jax.lax.cond(needed, step, nothing, state, *inputs)

    state, counts = jax.lax.scan(maybe, state, (groups, *more))
    return state, jax.tree.map(lambda a: jnp.sum(a, axis=0, dtype=a.dtype), counts)


@outermost_jit
def generate(batch: Batch) -> Generated:
    """Makes the images in one program, one AR step after the other."""
    bound = bind(batch)
    state, counts = begin(bound)
    for segment, groups in plan_segments(batch.network.seq_len, batch.recipe):
        state, more = ar_steps(bound, segment, state, group_arrays(groups, bound))
        counts = add(counts, more)
    return output(bound, state.tokens, batch.network.seq_len, counts)


def stream(batch: Batch) -> Iterator[Generated]:
    """Yields the images as they are after each AR step. Every AR step is a jitted call
    of its own."""
    bound = _bind(batch)
    state, counts = begin(bound)
    for segment, groups in plan_segments(batch.network.seq_len, batch.recipe):
        for group in groups:
            arrays = group_arrays((group,), bound)
            state, more = _ar_steps(bound, segment, state, arrays)
            counts = add(counts, more)
            yield _output(bound, state.tokens, group.start + group.size, counts)


def output(
    bound: BoundModel,
    tokens: Array,
    final: Array | int,
    counts: Counts,
    marks: Array | None = None,
    gamma: int = 0,
) -> Generated:
    """Returns the images whose first `final` tokens in reveal order are generated (see
    `counts.generated`). The rounds of an image are the AR steps up to there that
    generated a token of it."""
    ends = jnp.array([group.start + group.size for group in bound.recipe.groups])
    known = 0 if bound.given is None else bound.given.number[:, None]
    taken = jnp.broadcast_to(known < ends, (bound.images, len(ends))) & (ends <= final)
    counts = counts._replace(rounds=jnp.sum(taken, axis=1, dtype=jnp.int32))
    if marks is None:
        marks = jnp.zeros(tokens.shape[:2], jnp.int8)
    return generated(bound, tokens, marks, final, counts, gamma)


_bind = jax.jit(bind)
_ar_steps = outermost_jit(ar_steps, static_argnames=("segment",))
_output = jax.jit(output)


def group_arrays(groups: tuple[Group, ...], bound: BoundModel) -> GroupArrays:
    """Returns S groups as arrays to scan over."""
    starts, sizes = (
        jnp.array(column) for column in zip(*((g.start, g.size) for g in groups))
    )
    recipe = bound.recipe
    scale = guidance_scale(groups, recipe.cfg, recipe.cfg_schedule)
    return GroupArrays(starts, sizes, scale)


def begin(bound: BoundModel) -> tuple[PlainState, Counts]:
    """Returns the state before the first AR step, with known tokens alone in it, and
    the counts so far: one call if known tokens had to be put into a cache."""
    network = bound.network
    segments = plan_segments(network.seq_len, bound.recipe)
    padded = network.seq_len + max(segment.width for segment, _ in segments) - 1
    tokens = jnp.zeros((bound.images, padded, network.token_dim), bound.dtype)
    cache = None
    counts = no_counts(bound.images)
    tokens = put_back(bound.given, tokens)
    if isinstance(network, CachedTokenModel):
        cache = network.init_cache(bound.params, bound.order, bound.class_embedding)
        # One call fills the cache for the known tokens. It also writes entries behind
        # them, which are overwritten before anything reads them.
        if bound.given is not None:
            whole = Segment(network.seq_len, network.seq_len, bound.recipe.respacing)
            _, _, cache = group_context(
                bound, whole, PlainState(tokens, cache), jnp.int32(0)
            )
            counts = called(bound, "backbone", bound.images)
    first = tokens[:, 0] if bound.recipe.separate_first else None
    return PlainState(tokens, cache, first), counts
