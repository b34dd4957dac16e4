"""The rule, which decides which places a step fills, and with which tokens.

The rule looks at the earliest block that has a place to fill. There it fills the place
whose token the model is most confident of; on a tie, the first such place. With
`per_step` it fills that many places. With a `threshold` it fills all places whose
confidence is above the threshold, if these are enough. At temperature 0 the token of a
place is the most probable one. Above 0, top-p and top-k leave some tokens, and the rule
takes the token with the largest logit + temperature * Gumbel noise. Each step and place
has noise of its own.

The confidence in a place is measured as the published samplers measure it:

- "clean" is LLaDA's low-confidence remasking: the probability of the place's token by
  the unchanged logits, without temperature or cuts.
- "probability", "margin" and "entropy" are Dream's maskgit_plus, topk_margin and
  entropy. They are computed from the distribution that the token is drawn from, after
  the temperature, top-p and top-k, in this order.
- "random" is LLaDA's random remasking, which fills places in random order, whatever the
  model says.
- "sequential" fills places from left to right, whatever the model says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cspd_jax.coupling.acceptance import at_least_float32
from cspd_jax.coupling.categorical import gumbel
from cspd_jax.masked.canvas import Canvas, Window
from cspd_jax.sampling import cut_top_k, cut_top_p, most_probable

Array = jax.Array
_PLACES = 2**32 - 2  # larger than any step, so no step's noise is derived from it
_NO_BLOCK = jnp.iinfo(jnp.int32).max


class Candidates(NamedTuple):
    """The token that each place would be filled with, and how soon.

    tokens: [..., W] one token id for each place.
    confidence: [..., W] the larger it is, the earlier the place is filled.
    """

    tokens: Array
    confidence: Array


class Scores(NamedTuple):
    """Logits of every token at every place, without noise.

    clean: [..., W, V] the model's logits, with -inf for ids that are never written.
    drawn: [..., W, V] the logits that tokens are drawn from and that Dream's
        confidences are computed from: `clean` after the temperature, with -inf for
        tokens that top-p and top-k cut. It is `clean` itself if neither cuts nor
        Dream's confidences are used.
    """

    clean: Array
    drawn: Array


def candidates(
    canvas: Canvas, logits: Array, places: Array, steps: Array
) -> Candidates:
    """Returns the candidates [B, ..., W] from logits [B, ..., W, V] at places [B, ...,
    W], for steps [B, ...]."""
    return drawn_from(canvas, scores(canvas, logits), places, steps)


def scores(canvas: Canvas, logits: Array) -> Scores:
    """Returns the scores of logits [B, ..., W, V]. They have no noise, so they do not
    depend on the step.

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
    """Returns the candidates [B, ..., W] from scores `of_tokens` [B, ..., W, V] at
    places [B, ..., W], with the noise of steps [B, ...]."""
    (logits, drawn) = of_tokens
    options = canvas.options
    noisy = logits if drawn is logits else jnp.where(drawn > -jnp.inf, logits, -jnp.inf)
    if canvas.keys is not None:
        noise = step_noise(canvas.keys, steps, places, logits.shape[-1], logits.dtype)
        noisy = noisy + by_row(options.temperature, logits) * noise
    tokens = most_probable(noisy)
    if options.confidence == "sequential":
        return Candidates(tokens, -places.astype(logits.dtype))
    if options.confidence == "random":
        return Candidates(tokens, place_noise(canvas.keys, steps, places, logits.dtype))
    confidence = MEASURES[options.confidence](
        logits if options.confidence == "clean" else drawn, tokens
    )
    if options.place_temperature is None:
        return Candidates(tokens, confidence)
    # The largest confidence + temperature * Gumbel noise is a draw from
    # softmax(confidence / temperature).
    scale = by_row(options.place_temperature, confidence)
    if options.confidence == "probability":
        confidence = jnp.exp(confidence)
    return Candidates(
        tokens,
        confidence + scale * place_noise(canvas.keys, steps, places, logits.dtype),
    )


def step_noise(keys: Array, steps: Array, places: Array, num_ids: int, dtype) -> Array:
    """Draws Gumbel noise [B, ..., W, num_ids], determined by the keys [B], the steps
    [B, ...] and the places [B, ..., W]."""
    fold = jax.random.fold_in
    of_row = lambda key, steps, places: jax.vmap(
        lambda s, p: jax.vmap(lambda q: fold(fold(key, s), q))(p)
    )(steps.reshape(-1), places.reshape(-1, places.shape[-1]))
    made = jax.vmap(of_row)(keys, steps, places)
    return gumbel(made.reshape(places.shape), num_ids, dtype)


def place_noise(keys: Array | None, steps: Array, places: Array, dtype) -> Array:
    """Draws Gumbel noise [B, ..., W], one number per place, independent of the noise of
    the tokens."""
    assert keys is not None
    of_places = jax.vmap(lambda key: jax.random.fold_in(key, _PLACES))(keys)
    return step_noise(of_places, steps, places, 1, dtype)[..., 0]


def eligible(masked: Array, window: Window) -> Array:
    """Returns [..., W], which masked places a step may fill: places of the earliest
    block that has a masked place. The arrays of the window have the shape of `masked`
    [..., W].

    For example, masked [F, T, F, T] in blocks [0, 0, 1, 1] gives [F, T, F, F].
    """
    first = jnp.min(jnp.where(masked, window.blocks, _NO_BLOCK), axis=-1, keepdims=True)
    open_places = masked & (window.blocks == first)
    alone = open_places & window.alone
    return jnp.where(jnp.any(alone, axis=-1, keepdims=True), alone, open_places)


def taken(
    canvas: Canvas,
    offered: Candidates,
    masked: Array,
    window: Window,
    count: Array | int | None = None,
) -> Array:
    """Returns [..., W], which masked places a step fills.

    masked: [..., W] whether a place is still to be filled.
    window: the window, whose arrays have the shape of `masked`.
    count: the number of places, which can be an array [..., 1]; None as the options
        say.
    """
    open_places = eligible(masked, window)
    if count is not None:
        return surest(offered, open_places, count)
    options = canvas.options
    chosen = surest(offered, open_places, options.per_step)
    if options.threshold is None:
        return chosen
    least = by_row(options.threshold, offered.confidence)
    if options.confidence in ("clean", "probability"):
        least = jnp.log(least)
    sure = open_places & (offered.confidence > least)
    enough = jnp.sum(sure, axis=-1, keepdims=True) >= options.per_step
    return jnp.where(enough, sure, chosen)


def surest(offered: Candidates, open_places: Array, count: Array | int) -> Array:
    """Returns bool [..., W], true at the `count` most confident open places [..., W];
    on a tie, the first place counts as more confident."""
    falling = jnp.where(open_places, -_finite(offered.confidence), jnp.inf)
    if isinstance(count, int) and count == 1:
        first = jnp.argmin(falling, axis=-1, keepdims=True)
        return open_places & (jnp.arange(falling.shape[-1]) == first)
    order = jnp.argsort(falling, axis=-1, stable=True)
    return open_places & (jnp.argsort(order, axis=-1) < count)


def _finite(confidence: Array) -> Array:
    """Replaces -inf and NaN in a confidence by the least finite number.

    Every open place then has a larger confidence than a filled one, which has -inf. So
    each step fills a place, and the loop ends whatever the network returns.
    """
    least = jnp.finfo(confidence.dtype).min
    return jnp.maximum(jnp.where(jnp.isnan(confidence), least, confidence), least)


def uses_tempered(canvas: Canvas) -> bool:
    """Returns whether `tempered` logits are needed: for top-p, for top-k, or for one of
    Dream's confidences."""
    cuts = canvas.options.top_p is not None or canvas.options.top_k is not None
    return cuts or canvas.options.confidence in TEMPERED


def tempered(canvas: Canvas, logits: Array) -> Array:
    """Returns the logits [B, ..., W, V] <= 0 that tokens are drawn from, with -inf for
    the tokens that top-p and top-k cut.

    A temperature of 0 counts as 1 here. Dream does the same, so that its confidences
    are defined for greedy tokens, too.
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
    """Reshapes a number, [] or [B], so that it broadcasts against x [B, ...], and casts
    it to the type of x."""
    return jnp.reshape(jnp.asarray(number), (-1,) + (1,) * (x.ndim - 1)).astype(x.dtype)


def log_probability(logits: Array, tokens: Array) -> Array:
    """Returns the log probabilities [...] of tokens [...] by logits [..., V]."""
    # A near-certain token has a log probability close to 0. Large logits would round
    # its digits away, so the largest logit is subtracted first.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jnp.log(jnp.sum(jnp.exp(logits), axis=-1))


def margin(logits: Array, tokens: Array) -> Array:
    """Returns [...], the probability of the most probable token minus the probability
    of the second one, by logits [..., V]."""
    probs = jax.nn.softmax(logits, axis=-1)
    best = jnp.argmax(probs, axis=-1, keepdims=True)
    others = jnp.where(jnp.arange(probs.shape[-1]) == best, 0, probs)
    return jnp.max(probs, axis=-1) - jnp.max(others, axis=-1)


def negative_entropy(logits: Array, tokens: Array) -> Array:
    """Returns [...], the sum of p log p over the tokens, where p = softmax(logits) for
    logits [..., V]."""
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return jnp.sum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0), axis=-1)


# Dream's measures, which read the distribution that the token is drawn from.
TEMPERED = ("probability", "margin", "entropy")
MEASURES: dict[str, Callable[[Array, Array], Array]] = {
    "clean": log_probability,
    "probability": log_probability,
    "margin": margin,
    "entropy": negative_entropy,
}
