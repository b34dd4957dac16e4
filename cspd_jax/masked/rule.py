"""The stepwise rule: which place is filled next, and with which token.

In the earliest block with something to fill, the rule takes the place whose token the
model is most confident of, the first one if several are equal. At temperature 0 the
token of a place is the most probable one; above, it has the largest logit + temperature
* Gumbel noise, with noise that belongs to the step and the place, of the tokens that
top-p and top-k leave.

How sure a model is of a place is measured as the published samplers do. "clean" is
LLaDA's low-confidence remasking: the probability of the place's token by the logits as
they are, without temperature or cuts. "probability", "margin" and "entropy" are Dream's
maskgit_plus, topk_margin and entropy, of the distribution that the token is drawn from:
after the temperature, top-p and top-k, in this order. "random" is LLaDA's random
remasking: places in random order, whatever the model says."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import at_least_float32
from cspd_jax.masked.canvas import Canvas
from cspd_jax.sampling import cut_top_k, cut_top_p, gumbel, most_probable

Array = jax.Array
_PLACES = 2**32 - 2  # more than there are steps
_NO_BLOCK = jnp.iinfo(jnp.int32).max


class Candidates(NamedTuple):
    """What each place would be filled with.

    tokens: [..., W]
    confidence: [..., W] the larger, the earlier the place is filled.
    """

    tokens: Array
    confidence: Array


class Scores(NamedTuple):
    """Logits of every token at every place, without noise.

    clean: [..., W, V] the model's, with -inf for ids that are never written.
    drawn: [..., W, V] `clean` with the temperature and the cuts, -inf for those cut:
        what may be drawn, and what Dream's confidences are of; `clean` itself if
        nothing needs it.
    """

    clean: Array
    drawn: Array


class Choice(NamedTuple):
    """The place that the rule takes.

    index: [...] into the window.
    token: [...] for that place.
    exists: [...] whether there was a place to fill.
    """

    index: Array  # type: ignore[assignment]
    token: Array
    exists: Array


def candidates(
    canvas: Canvas, logits: Array, places: Array, steps: Array
) -> Candidates:
    """Returns the candidates from logits [B, ..., W, V] at places [B, ..., W], for
    steps [B, ...]."""
    return drawn_from(canvas, scores(canvas, logits), places, steps)


def scores(canvas: Canvas, logits: Array) -> Scores:
    """Returns the scores from logits [B, ..., W, V], which are the same at each step.

    Neither the mask nor an id that pads the vocabulary is ever a candidate.
    """
    config = canvas.network.config
    ids = jnp.arange(logits.shape[-1])
    allowed = (ids < config.known_ids) & (ids != canvas.mask_id)
    (logits,) = at_least_float32(logits)
    logits = jnp.where(allowed, logits, -jnp.inf)
    return Scores(logits, tempered(canvas, logits) if uses_tempered(canvas) else logits)


def drawn_from(
    canvas: Canvas, of_tokens: Scores, places: Array, steps: Array
) -> Candidates:
    """Returns the candidates at places [B, ..., W], for steps [B, ...]."""
    (logits, drawn) = of_tokens
    options = canvas.options
    noisy = logits if drawn is logits else jnp.where(drawn > -jnp.inf, logits, -jnp.inf)
    if canvas.keys is not None:
        noise = step_noise(canvas.keys, steps, places, logits.shape[-1], logits.dtype)
        noisy = noisy + by_row(options.temperature, logits) * noise
    tokens = most_probable(noisy)
    if options.confidence == "random":
        return Candidates(tokens, place_noise(canvas.keys, steps, places, logits.dtype))
    confidence = MEASURES[options.confidence](
        logits if options.confidence == "clean" else drawn, tokens
    )
    if options.place_temperature is None:
        return Candidates(tokens, confidence)
    # softmax(confidence / temperature) without replacement, by Gumbel noise
    scale = by_row(options.place_temperature, confidence)
    if options.confidence == "probability":
        confidence = jnp.exp(confidence)
    return Candidates(
        tokens,
        confidence + scale * place_noise(canvas.keys, steps, places, logits.dtype),
    )


def step_noise(keys: Array, steps: Array, places: Array, num_ids: int, dtype) -> Array:
    """Draws Gumbel noise [B, ..., W, num_ids] by the row's key [B], the step [B, ...]
    and the place."""
    fold = jax.random.fold_in
    of_row = lambda key, steps, places: jax.vmap(
        lambda s, p: jax.vmap(lambda q: fold(fold(key, s), q))(p)
    )(steps.reshape(-1), places.reshape(-1, places.shape[-1]))
    made = jax.vmap(of_row)(keys, steps, places)
    return gumbel(made.reshape(places.shape), num_ids, dtype)


def place_noise(keys: Array | None, steps: Array, places: Array, dtype) -> Array:
    """Draws Gumbel noise [B, ..., W] of the places themselves, apart from that of their
    tokens."""
    assert keys is not None
    of_places = jax.vmap(lambda key: jax.random.fold_in(key, _PLACES))(keys)
    return step_noise(of_places, steps, places, 1, dtype)[..., 0]


def eligible(masked: Array, blocks: Array) -> Array:
    """Returns which of the masked places [..., W] are in the earliest block that has
    any."""
    first = jnp.min(jnp.where(masked, blocks, _NO_BLOCK), axis=-1, keepdims=True)
    return masked & (blocks == first)


def choose(offered: Candidates, masked: Array, blocks: Array) -> Choice:
    """Applies the rule to places [..., W]."""
    open_places = eligible(masked, blocks)
    index = jnp.argmax(
        jnp.where(open_places, _finite(offered.confidence), -jnp.inf), axis=-1
    )
    token = jnp.take_along_axis(offered.tokens, index[..., None], axis=-1)[..., 0]
    return Choice(index, token, jnp.any(masked, axis=-1))


def surest(offered: Candidates, open_places: Array, count: Array) -> Array:
    """Returns the `count` most confident of the open places [..., W], the first on
    ties: bool [..., W]."""
    falling = jnp.argsort(
        jnp.where(open_places, -_finite(offered.confidence), jnp.inf),
        axis=-1,
        stable=True,
    )
    rank = jnp.argsort(falling, axis=-1)
    return open_places & (rank < count)


def _finite(confidence: Array) -> Array:
    """Returns it with the least number in place of -inf and NaN, so that an open place
    is before all others: a loop that fills a place in each step ends, whatever a
    network says."""
    least = jnp.finfo(confidence.dtype).min
    return jnp.maximum(jnp.where(jnp.isnan(confidence), least, confidence), least)


def uses_tempered(canvas: Canvas) -> bool:
    """Returns whether the distribution that tokens are drawn from is needed, beyond the
    logits."""
    cuts = canvas.options.top_p is not None or canvas.options.top_k is not None
    return cuts or canvas.options.confidence not in ("clean", "random")


def tempered(canvas: Canvas, logits: Array) -> Array:
    """Returns logits [B, ..., W, V] <= 0 that tokens are drawn from, with -inf for
    those cut.

    A temperature of 0 counts as 1 here, as in Dream, whose measures exist for greedy
    tokens, too.
    """
    temperature = by_row(canvas.options.temperature, logits)
    x = logits - jnp.max(logits, axis=-1, keepdims=True)
    x = x / jnp.where(temperature > 0, temperature, 1)
    if canvas.options.top_p is not None:
        x = cut_top_p(x, canvas.options.top_p)
    if canvas.options.top_k is not None:
        x = cut_top_k(x, canvas.options.top_k)
    return x


def by_row(number: Array | float, x: Array) -> Array:
    """Returns a number, [] or [B], to broadcast against x [B, ...], in its type."""
    return jnp.reshape(jnp.asarray(number), (-1,) + (1,) * (x.ndim - 1)).astype(x.dtype)


def log_probability(logits: Array, tokens: Array) -> Array:
    """Returns the log probabilities [...] of tokens [...] by logits [..., V]."""
    # That of a near-certain token is close to 0. Subtracting the largest logit first
    # keeps its digits, which the rounding of large logits would swamp.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jnp.log(jnp.sum(jnp.exp(logits), axis=-1))


def margin(logits: Array, tokens: Array) -> Array:
    """Returns by how much the most probable token is more probable than the second
    one."""
    probs = jax.nn.softmax(logits, axis=-1)
    best = jnp.argmax(probs, axis=-1, keepdims=True)
    others = jnp.where(jnp.arange(probs.shape[-1]) == best, 0, probs)
    return jnp.max(probs, axis=-1) - jnp.max(others, axis=-1)


def negative_entropy(logits: Array, tokens: Array) -> Array:
    """Returns the sum of p log p."""
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0), axis=-1)


MEASURES: dict[str, Callable[[Array, Array], Array]] = {
    "clean": log_probability,
    "probability": log_probability,
    "margin": margin,
    "entropy": negative_entropy,
}
