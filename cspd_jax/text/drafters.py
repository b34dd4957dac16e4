"""What proposes tokens for the target to verify: a smaller model, or copies from the
text itself; heads are in `states`, trees in `trees`. A drafter of your own is hashable
and a subclass of `Drafter`, or like one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.check import UserError
from cspd_jax.language_models import LanguageModel, Model, Pass, Prompts, bound
from cspd_jax.sampling import Sampling, fit_vocabulary, gumbel_max, log_probs, noise_at

Array = jax.Array


class DraftRequest(NamedTuple):
    """What a drafter is asked for.

    tokens: [B, max_len] the texts; positions from `length` on are not filled yet.
    length: [B] tokens so far; the drafts continue from there.
    count: [B] how many drafts are wanted at most; 0 for rows that need none.
    keys: [B] to be folded with a draft's position for its noise; None when greedy.
    sampling: how to draw.
    stop_ids: [S] nothing needs to be drafted after one of these.
    confidence: [] nothing more is drafted where the drafter gives no token as much as
        this; None is the drafter's own way.
    max_gamma: static bound G on count.
    num_ids: static size of the target's distributions.
    needs_log_q: static; whether the rule uses the distributions that the drafts were
        drawn from.
    states: [B, max_len, S D] what entered layers of the target at each token but the
        last; None unless the drafter reads them.
    """

    tokens: Array
    length: Array
    count: Array  # type: ignore[assignment]
    keys: Array | None
    sampling: Sampling
    stop_ids: Array
    confidence: Array | None
    max_gamma: int
    num_ids: int
    needs_log_q: bool
    states: Array | None = None


class Drafts(NamedTuple):
    """What a drafter proposes.

    tokens: [B, G] of which the first `count` are drafts.
    count: [B] drafts of each row.
    log_q: [B, G, num_ids] the distribution that each was drawn from, given those before
        it. None means that each is certain given those before it, or that the
        distributions were not needed.
    passes: [] passes of the drafting network, one after the other.
    rows: [] tokens in those passes.

    Whether a row stops drafting may depend on the drafts so far, and on the
    distribution that the next one would be drawn from. Every token that was drawn must
    be handed over, though: holding one back because of what it is would bias the
    output.
    """

    tokens: Array
    count: Array  # type: ignore[assignment]
    log_q: Array | None
    passes: Array
    rows: Array


class Drafter(Protocol):
    """Pure functions of explicit parameters and of a state, which may be any
    pytree."""

    @property
    def entering(self) -> tuple[int, ...]:
        """The layers of the target whose states it reads: those that enter them."""
        return ()

    def begin(
        self, params: ArrayTree, prompts: Prompts, max_len: int, states: Array | None
    ) -> ArrayTree:
        """Returns the state before the first round, for texts of up to max_len tokens.

        states: [B, max_len, S D] the target's, at the prompts' tokens but their last;
            None if the drafter reads none.
        """

    def draft(
        self, params: ArrayTree, state: ArrayTree, request: DraftRequest
    ) -> tuple[Drafts, ArrayTree]:
        """Returns drafts and the next state. A row's drafts must depend on that row
        alone."""


class Drafting(NamedTuple):
    """A drafter together with its parameters.

    drafter: a `Drafter`; hashable.
    params: any pytree, handed to both of its functions.
    """

    drafter: Drafter
    params: ArrayTree


DrafterLike: TypeAlias = "Model | Drafter | Drafting | None"  # see `Speculation`


def resolve_drafter(drafter: DrafterLike) -> Drafting:
    """Returns a drafter with its parameters: a model or a pair (network, params)
    becomes a `ModelDrafter`."""
    if drafter is None:
        raise UserError("nothing drafts; give a draft, or Plain() as the method")
    if hasattr(drafter, "draft"):
        drafter = Drafting(cast(Drafter, drafter), None)
    if not isinstance(drafter, Drafting):
        network, params = bound(cast(Model, drafter))
        drafter = Drafting(ModelDrafter(network), params)
    # The network of a drafter that draws from a model.
    network = getattr(drafter.drafter, "network", None)
    if network is not None and not network.config.causal:
        raise UserError(
            "the draft model is not causal; a causal target needs a causal draft"
        )
    return drafter


def no_drafts(batch: int, room: int = 0) -> Drafts:
    """Returns no drafts at all, as in plain decoding, in place of up to `room`."""
    zero = jnp.int32(0)
    return Drafts(
        jnp.zeros((batch, room), jnp.int32),
        jnp.zeros(batch, jnp.int32),
        None,
        zero,
        zero,
    )


def is_any_of(tokens: Array, ids: Array) -> Array:
    """Returns whether each of the tokens [...] is one of `ids` [S]."""
    return jnp.any(tokens[..., None] == ids, axis=-1)


def read_prompts(
    network: LanguageModel,
    params: ArrayTree,
    prompts: Prompts,
    max_len: int,
    entering: tuple[int, ...] = (),
) -> tuple[ArrayTree, Array | None]:
    """Has a network read all but the last token of each prompt, and returns its cache,
    and the states [B, max_len, S D] that entered the layers asked for at these tokens;
    None if none were."""
    batch, longest = prompts.tokens.shape
    cache = network.empty_cache(batch, max_len)
    if longest == 1 and not entering:
        return cache, None
    # Of an only token the states' width alone is read.
    tokens = prompts.tokens[:, : max(longest - 1, 1)]
    steps = jnp.arange(tokens.shape[1])
    positions = jnp.where(steps < prompts.lengths[:, None] - 1, steps, max_len)
    # No logits are read here, so only one per row is asked for.
    unused = jnp.zeros((batch, 1), jnp.int32)
    _, cache, states = network.apply(
        params, tokens, positions, cache, rows=unused, entering=entering
    )
    if states is None:
        return cache, None
    return cache, jnp.pad(states, ((0, 0), (0, max_len - tokens.shape[1]), (0, 0)))


def read_last_two(
    network: LanguageModel, params: ArrayTree, cache: ArrayTree, request: DraftRequest
) -> Pass:
    """Reads logits [B, 1, V] of the network after the text, whose last two tokens its
    cache may lack."""
    last_two = request.length[:, None] + jnp.arange(-2, 0)
    tokens = jnp.take_along_axis(request.tokens, jnp.maximum(last_two, 0), axis=1)
    second = jnp.ones((len(tokens), 1), jnp.int32)
    return network.apply(
        params, known_to(network, tokens), last_two, cache, rows=second
    )


def known_to(network: LanguageModel, tokens: Array) -> Array:
    """Returns tokens that a network can read; an id beyond its vocabulary is replaced
    by its last one."""
    return jnp.minimum(tokens, network.config.vocab_size - 1)


class _Progress(NamedTuple):
    """The carry of the drafting loop.

    step: [] drafts made so far.
    tokens, count, log_q: as in `Drafts`.
    state: of the draft network.
    """

    step: Array
    tokens: Array
    count: Array  # type: ignore[assignment]
    log_q: Array | None
    state: ArrayTree


# From the network's state, the newest draft [B] and its position [B] (max_len in rows
# that want no more) to logits [B, V] of the next one and the network's next state.
Continue: TypeAlias = "Callable[[ArrayTree, Array, Array], tuple[Array, ArrayTree]]"


def one_by_one(
    request: DraftRequest,
    logits: Array,
    state: ArrayTree,
    further: Continue,
    ids: Array | int,
) -> tuple[Drafts, ArrayTree]:
    """Draws drafts in turn, the first from logits [B, V], until every row has as many
    as it wants; and the network's state after that.

    ids: which of the target's ids each of the V is; or how many of them are real, if
        they are its first ones.
    """
    batch, max_len = request.tokens.shape
    log_q = None
    if request.needs_log_q and not request.sampling.greedy:
        dtype = jnp.promote_types(logits.dtype, jnp.float32)
        log_q = jnp.zeros((batch, request.max_gamma, request.num_ids), dtype)
    no_tokens = jnp.zeros((batch, request.max_gamma), jnp.int32)
    start = _Progress(jnp.int32(0), no_tokens, request.count, log_q, state)

    def unfinished(progress: _Progress) -> Array:
        return progress.step < jnp.max(progress.count)

    def extend(progress: _Progress) -> _Progress:
        newest = jax.lax.dynamic_slice_in_dim(
            progress.tokens, progress.step - 1, 1, axis=1
        )[:, 0]
        position = request.length + progress.step - 1
        position = jnp.where(progress.step < progress.count, position, max_len)
        logits, state = further(progress.state, newest, position)
        return _add_draft(request, progress._replace(state=state), logits, ids)

    first = _add_draft(request, start, logits, ids)
    progress = jax.lax.while_loop(unfinished, extend, first)
    rows = batch * (progress.step + 1)
    return Drafts(
        progress.tokens, progress.count, progress.log_q, progress.step, rows
    ), progress.state


def among_known(
    logits: Array, ids: Array | int, num_ids: int
) -> tuple[Array, Array | None]:
    """Returns logits [..., V] without the ids that pad the target's vocabulary, and
    which of the target's ids they are of [V]; None where they are of its first ones.
    ids: see `one_by_one`."""
    if isinstance(ids, int):
        return fit_vocabulary(logits, ids, num_ids), None
    return jnp.where(ids < num_ids, logits, -jnp.inf), jnp.minimum(ids, num_ids - 1)


def spread(log_q: Array, own: Array | None, num_ids: int) -> Array:
    """Returns log_q [..., V] over the target's ids [..., num_ids]. own: what
    `among_known` returns."""
    if own is None:
        return log_q
    return (
        jnp.full((*log_q.shape[:-1], num_ids), -jnp.inf, log_q.dtype)
        .at[..., own]
        .max(log_q)
    )


def _add_draft(
    request: DraftRequest, progress: _Progress, logits: Array, ids: Array | int
) -> _Progress:
    """Adds a draft to every row that still wants one, from logits [B, V]."""
    logits, own = among_known(logits, ids, request.num_ids)
    log_q = progress.log_q
    if request.sampling.greedy:
        drawn = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        log_p = logits
    else:
        assert request.keys is not None
        log_p = log_probs(logits, request.sampling)
        noise = noise_at(
            request.keys, request.length + progress.step, request.num_ids, log_p.dtype
        )
        drawn = gumbel_max(log_p, noise if own is None else noise[:, own])
        if log_q is not None:
            log_q = log_q.at[:, progress.step].set(spread(log_p, own, request.num_ids))
    chosen = drawn if own is None else own[drawn]
    count = progress.count
    # Asked of the distribution, not of what was drawn from it.
    if request.confidence is not None:
        unsure = jnp.max(jax.nn.softmax(log_p, axis=-1), axis=-1) < request.confidence
        count = jnp.where(unsure, jnp.minimum(count, progress.step), count)
    tokens = progress.tokens.at[:, progress.step].set(
        jnp.where(progress.step < count, chosen, 0)
    )
    is_last = is_any_of(chosen, request.stop_ids)
    count = jnp.where(is_last, jnp.minimum(count, progress.step + 1), count)
    return _Progress(progress.step + 1, tokens, count, log_q, progress.state)


@dataclasses.dataclass(frozen=True)
class ModelDrafter(Drafter):
    """Drafts token by token from another language model with the target's ids, with a
    cache of its own.

    The model may be smaller, quantised or distilled, and its vocabulary may be padded
    differently.

    Between rounds its cache lacks the last one or two tokens of the row: two if all
    drafts were accepted, because the last draft was never fed. The first pass of a
    round therefore always feeds the last two.
    """

    network: LanguageModel

    def begin(
        self, params: ArrayTree, prompts: Prompts, max_len: int, states: Array | None
    ) -> ArrayTree:
        known = prompts._replace(tokens=known_to(self.network, prompts.tokens))
        return read_prompts(self.network, params, known, max_len)[0]

    def draft(
        self, params: ArrayTree, cache: ArrayTree, request: DraftRequest
    ) -> tuple[Drafts, ArrayTree]:
        logits, cache, _ = read_last_two(self.network, params, cache, request)

        def further(
            cache: ArrayTree, newest: Array, position: Array
        ) -> tuple[Array, ArrayTree]:
            newest = known_to(self.network, newest)
            logits, cache, _ = self.network.apply(
                params, newest[:, None], position[:, None], cache
            )
            return logits[:, 0], cache

        return one_by_one(
            request, logits[:, 0], cache, further, self.network.config.known_ids
        )


@dataclasses.dataclass(frozen=True)
class PromptLookup(Drafter):
    """Copies what followed the last time the text read as it does now.

    It looks for the last `longest` tokens earlier in the text, then for fewer, down to
    `shortest`, and takes the most recent of several matches. A copy that reaches the
    end of the text continues with itself. A match of n tokens is continued by at most
    2^n - 1: the longer it is, the longer it tends to go on.

    It has neither parameters nor state, and its drafts are certain. A row without a
    match gets no drafts.
    """

    longest: int = 4
    shortest: int = 2

    def begin(
        self, params: ArrayTree, prompts: Prompts, max_len: int, states: Array | None
    ) -> None:
        return None

    def draft(
        self, params: ArrayTree, state: None, request: DraftRequest
    ) -> tuple[Drafts, None]:
        start, matched = self._continuation(request.tokens, request.length)
        period = request.length - start
        index = (
            start[:, None]
            + jnp.arange(request.max_gamma) % jnp.maximum(period, 1)[:, None]
        )
        index = jnp.minimum(index, request.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(request.tokens, index, axis=1)
        most = 2 ** jnp.minimum(matched, 30) - 1  # of 31 on it is no int32
        count = jnp.where(period > 0, jnp.minimum(most, request.count), 0)
        zero = jnp.int32(0)
        return Drafts(tokens, count, None, zero, zero), None

    def _continuation(self, tokens: Array, length: Array) -> tuple[Array, Array]:
        """Returns the position [B] after the best match, or `length` [B], and how many
        tokens matched [B]."""
        # Candidate positions of a match's last token.
        ends = jnp.arange(tokens.shape[1])
        run = ends < length[:, None] - 1
        matched = jnp.zeros(tokens.shape, jnp.int32)
        for back in range(self.longest):
            ending = jnp.take_along_axis(
                tokens, jnp.maximum(length - 1 - back, 0)[:, None], axis=1
            )
            shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
            run &= (shifted == ending) & (ends >= back)
            matched += run
        best = jnp.argmax(matched * tokens.shape[1] + ends * (matched > 0), axis=1)
        matched = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0]
        return jnp.where(matched >= self.shortest, best + 1, length), matched
