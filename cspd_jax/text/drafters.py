"""Drafters, which propose tokens for the target to verify. Here are drafters that use a
smaller model or copy from the text itself. The module `states` has drafters that use a
head, and `trees` has drafters of trees. Your own drafter is a hashable object with the
functions of `Drafter`, and may be a subclass."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
from chex import ArrayTree

from cspd_jax.check import UserError, naming
from cspd_jax.coupling.categorical import gumbel_max
from cspd_jax.language_models import LanguageModel, Model, Pass, Prompts, bound
from cspd_jax.sampling import Sampling, fit_vocabulary, log_probs, noise_at

Array = jax.Array


class DraftRequest(NamedTuple):
    """What a drafter gets in a round.

    tokens: [B, max_len] the texts; positions from `length` on are not filled yet.
    length: [B] the number of tokens so far, which is the position of the first draft.
    count: [B] the largest number of drafts that is wanted; 0 for rows that need none.
    keys: [B] one key per row. A drafter folds it with the position of a draft, and
        draws the draft with the result. None when greedy.
    sampling: how drafts are drawn.
    stop_ids: [S] the ids that end a text. Nothing needs to be drafted after them.
    confidence: a probability, one for all rows or one per row. A row drafts nothing
        more where the drafter gives no token this probability. With None the drafter
        uses its own.
    max_gamma: the bound G on count (static).
    num_ids: the number of ids in the target's distributions (static).
    needs_log_q: whether the rule reads the distributions from which the drafts were
        drawn (static).
    states: [B, K, S D] the hidden states that entered the layers `Drafter.entering` of
        the target, at each token but the last. K is at least max_len. None if the
        drafter reads no layers.
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

    tokens: [B, G] the drafts of each row, in its first `count` places.
    count: [B] the number of drafts of each row.
    log_q: [B, G, num_ids] the log probabilities with which each draft was drawn, given
        the drafts before it. They need not be normalised. None means that each draft is
        certain given the drafts before it, or that the rule does not read the
        distributions.
    passes: [] the number of passes of the drafting network, made one after the other.
    rows: [] the number of tokens in these passes.

    Whether a row stops drafting may depend on its drafts so far, and on the
    distribution from which the next draft would be drawn. But every token that was
    drawn must be returned: a drafter that holds a token back because of its value
    biases the output. A token that is no id of the target ends the row's drafts.
    """

    tokens: Array
    count: Array  # type: ignore[assignment]
    log_q: Array | None
    passes: Array
    rows: Array


class Drafter(Protocol):
    """A drafter: pure functions of explicit parameters and of a state, which may be any
    pytree."""

    @property
    def entering(self) -> tuple[int, ...]:
        """The layers of the target whose inputs, the hidden states, the drafter
        reads."""
        return ()

    def begin(
        self, params: ArrayTree, prompts: Prompts, max_len: int, states: Array | None
    ) -> ArrayTree:
        """Returns the drafter's state before the first round, for texts of up to
        max_len tokens.

        states: [B, K, S D] the target's hidden states at each token of the prompts but
            the last; None if the drafter reads no layers.
        """

    @abc.abstractmethod
    def draft(
        self, params: ArrayTree, state: ArrayTree, request: DraftRequest
    ) -> tuple[Drafts, ArrayTree]:
        """Returns drafts and the drafter's next state. The drafts of a row must depend
        on this row alone."""


class Drafting(NamedTuple):
    """A drafter together with its parameters.

    drafter: a `Drafter`, which is hashable.
    params: a pytree, which both functions of the drafter get.
    """

    drafter: Drafter
    params: ArrayTree


DrafterLike: TypeAlias = "Model | Drafter | Drafting | None"  # see `Speculation`


def resolve_drafter(drafter: DrafterLike) -> Drafting:
    """Returns a drafter with its parameters. A model, or a pair (network, params),
    becomes a `ModelDrafter`."""
    if drafter is None:
        raise UserError("nothing drafts; give a draft, or Plain() as the method")
    if isinstance(drafter, type):
        raise UserError(f"{drafter.__name__} is a class; write {drafter.__name__}(...)")
    if hasattr(drafter, "draft"):
        drafter = Drafting(cast(Drafter, drafter), None)
    if not isinstance(drafter, Drafting):
        with naming("the draft has no function draft, so it must be a model"):
            network, params = bound(cast(Model, drafter))
        drafter = Drafting(ModelDrafter(network), params)
    # A drafter that draws from a language model holds it as `network`.
    network = getattr(drafter.drafter, "network", None)
    if network is not None and not network.config.causal:
        raise UserError(
            "the draft model is not causal; a causal target needs a causal draft"
        )
    return drafter


def no_drafts(batch: int, room: int = 0) -> Drafts:
    """Returns arrays with room for `room` drafts and no drafts in them, as in plain
    decoding."""
    zero = jnp.int32(0)
    return Drafts(
        jnp.zeros((batch, room), jnp.int32),
        jnp.zeros(batch, jnp.int32),
        None,
        zero,
        zero,
    )


def is_any_of(tokens: Array, ids: Array) -> Array:
    """Returns whether each of the tokens [...] is one of the ids, bool [...].

    ids: [S] the ids.
    """
    return jnp.any(tokens[..., None] == ids, axis=-1)


def read_prompts(
    network: LanguageModel,
    params: ArrayTree,
    prompts: Prompts,
    max_len: int,
    entering: tuple[int, ...] = (),
) -> tuple[ArrayTree, Array | None]:
    """Reads all but the last token of each prompt with a network. Returns the network's
    cache and the hidden states [B, max_len, S D] that entered the layers `entering` at
    these tokens. Without layers the states are None."""
    batch, longest = prompts.tokens.shape
    cache = network.empty_cache(batch, max_len)
    if longest == 1 and not entering:
        return cache, None
    # The only token of prompts of length 1 is read as padding, for the states' width.
    tokens = prompts.tokens[:, : max(longest - 1, 1)]
    steps = jnp.arange(tokens.shape[1])
    positions = jnp.where(steps < prompts.lengths[:, None] - 1, steps, max_len)
    # Nothing reads the logits, so the pass computes them for one token per row.
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
    """Reads the last two tokens of each text, which the network's cache may lack. The
    pass has the logits [B, 1, V] after the text.

    A text of 5 tokens is read at the positions 3 and 4. A text of 1 token is read at
    the positions -1, which is padding, and 0.
    """
    last_two = request.length[:, None] + jnp.arange(-2, 0)
    tokens = jnp.take_along_axis(request.tokens, jnp.maximum(last_two, 0), axis=1)
    second = jnp.ones((len(tokens), 1), jnp.int32)
    return network.apply(
        params, known_to(network, tokens), last_two, cache, rows=second
    )


def known_to(network: LanguageModel, tokens: Array) -> Array:
    """Returns tokens that a network can read. An id beyond its vocabulary is replaced
    by the last id of the vocabulary."""
    return jnp.minimum(tokens, network.config.vocab_size - 1)


class _Progress(NamedTuple):
    """The carry of the drafting loop.

    step: [] the number of drafts so far.
    tokens, count, log_q: the same as in `Drafts`.
    state: the state of the drafting network.
    """

    step: Array
    tokens: Array
    count: Array  # type: ignore[assignment]
    log_q: Array | None
    state: ArrayTree


# A function that maps the network's state, the newest draft [B] and its position [B]
# (max_len in rows that want no more drafts) to the logits [B, V] of the next draft and
# the network's next state.
Continue: TypeAlias = "Callable[[ArrayTree, Array, Array], tuple[Array, ArrayTree]]"


def draft_in_turn(
    request: DraftRequest,
    logits: Array,
    state: ArrayTree,
    further: Continue,
    ids: Array | int,
) -> tuple[Drafts, ArrayTree]:
    """Draws drafts one after the other, until every row has as many as it wants.
    Returns the drafts and the network's last state.

    logits: [B, V] the logits of the first draft.
    state: the state of the network after it computed these logits.
    further: computes the logits of every further draft.
    ids: [V] the target's id of each of the network's ids. If the network has the
        target's ids in order, it is an int instead, the number of ids that are not
        padding.
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
    """Takes the ids that only pad the target's vocabulary out of logits [..., V].
    Returns the logits, and the target's id of each logit [V]. The ids are None if the
    logits belong to the target's ids in order, [..., num_ids].

    ids: the same as in `draft_in_turn`.
    """
    if isinstance(ids, int):
        return fit_vocabulary(logits, ids, num_ids), None
    return jnp.where(ids < num_ids, logits, -jnp.inf), jnp.minimum(ids, num_ids - 1)


def over_all_ids(log_q: Array, own: Array | None, num_ids: int) -> Array:
    """Returns log_q [..., V] over the target's ids, [..., num_ids]. Ids of the target
    that have no entry get -inf.

    own: [V] the target's id of each entry; None if they are in order. `among_known`
        returns it.

    For example, with num_ids = 4, log_q = [a, b] and own = [3, 0] give
    [b, -inf, -inf, a].
    """
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
    """Adds a draft to every row that still wants one.

    logits: [B, V] the logits of the draft.
    """
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
            log_q = log_q.at[:, progress.step].set(
                over_all_ids(log_p, own, request.num_ids)
            )
    chosen = drawn if own is None else own[drawn]
    count = progress.count
    # The test reads the distribution alone: a test of the drawn token would bias the
    # output.
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
    """Drafts token by token with another language model, which has a cache of its own.

    The model has the target's ids. It may be smaller, quantised or distilled, and its
    vocabulary may be padded differently.

    Between rounds the cache lacks the last one or two tokens of a row. It lacks two
    tokens if all drafts were accepted, because the model did not read the last draft.
    The first pass of a round therefore always reads the last two tokens.

    For example, the text is a b, and the drafts c d are accepted and followed by e. The
    model has read a b c. The next round begins by reading d e.
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

        return draft_in_turn(
            request, logits[:, 0], cache, further, self.network.config.known_ids
        )


@dataclasses.dataclass(frozen=True)
class PromptLookup(Drafter):
    """Copies the tokens that followed the last time the text read as it does now.

    The drafter looks for the last `longest` tokens earlier in the text, then for fewer
    tokens, down to `shortest`. If there are several matches, it takes the most recent
    one. A copy that reaches the end of the text continues with itself. A match of n
    tokens gives at most 2^n - 1 drafts, because a longer match tends to go on for
    longer.

    For example, the text 1 2 3 1 2 ends in 1 2, which it also began with. The match has
    2 tokens, so there are up to 3 drafts: 3 1 2.

    The drafter has neither parameters nor a state, and its drafts are certain. A row
    without a match gets no drafts.
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
        most = 2 ** jnp.minimum(matched, 30) - 1  # 2^31 overflows int32
        count = jnp.where(period > 0, jnp.minimum(most, request.count), 0)
        zero = jnp.int32(0)
        return Drafts(tokens, count, None, zero, zero), None

    def _continuation(self, tokens: Array, length: Array) -> tuple[Array, Array]:
        """Returns the position [B] after the best match, or `length` [B] without a
        match, and the number of tokens that matched [B]."""
        # The positions that the last token of a match may have.
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
