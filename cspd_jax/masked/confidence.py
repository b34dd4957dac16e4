"""How sure a model is of a place, as the published samplers measure it.

"clean" is LLaDA's low-confidence remasking: the probability of the place's token by the logits as they are,
without temperature or cuts. "probability", "margin" and "entropy" are Dream's maskgit_plus, topk_margin and
entropy, of the distribution that the token is drawn from: after the temperature, top-p and top-k, in this
order. "random" is LLaDA's random remasking: places in random order, whatever the model says.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from cspd_jax.masked.canvas import Canvas
from cspd_jax.text.sampling import cut_top_k, cut_top_p

Array = jax.Array


def uses_tempered(canvas: Canvas) -> bool:
    """Returns whether the distribution that tokens are drawn from is needed, beyond the logits."""
    cuts = canvas.options.top_p is not None or canvas.options.top_k is not None
    return cuts or canvas.options.confidence not in ("clean", "random")


def tempered(canvas: Canvas, logits: Array) -> Array:
    """Logits [B, ..., W, V] <= 0 that tokens are drawn from, with -inf for those cut.

    A temperature of 0 counts as 1 here, as in Dream, whose measures exist for greedy tokens, too.
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
    """A number, [] or [B], to broadcast against x [B, ...], in its type."""
    return jnp.reshape(jnp.asarray(number), (-1,) + (1,) * (x.ndim - 1)).astype(x.dtype)


def log_probability(logits: Array, tokens: Array) -> Array:
    """Returns the log probabilities [...] of tokens [...] by logits [..., V]."""
    # That of a near-certain token is close to 0. Subtracting the largest logit first keeps its digits, which
    # the rounding of large logits would swamp.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jnp.log(jnp.sum(jnp.exp(logits), axis=-1))


def margin(logits: Array, tokens: Array) -> Array:
    """By how much the most probable token is more probable than the second one."""
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
