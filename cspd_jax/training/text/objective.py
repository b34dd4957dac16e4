"""The objectives of language models, and measures on held-out text.

A causal model predicts each id of a row from the ids before it. A masked-diffusion
model sees a row in which each id was hidden with probability t ~ U(0, 1). Its
predictions of the hidden ids are weighted by 1/t, which makes the expected loss of a
row an upper bound on its negative log-likelihood (LLaDA).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import ArrayTree

from cspd_jax.keys import seed_key
from cspd_jax.networks.lm import LM
from cspd_jax.training.config import RunConfig
from cspd_jax.training.data.text import Texts
from cspd_jax.training.run import Learning, descend

Array = jax.Array
_TOGETHER = 16  # rows that are measured at once


class View(NamedTuple):
    """What a model is shown of rows, and what it must predict.

    seen: [B, L] int, the ids it reads.
    wanted: [B, L] int, the ids it should predict.
    weight: [B, L], of each prediction; the weighted sum over a row is its loss per id.
    """

    seen: Array
    wanted: Array
    weight: Array


def learning(config: RunConfig, target: tuple[LM, ArrayTree] | None = None) -> Learning:
    """Returns how a model learns rows of text; with a target, to predict what that
    predicts. The loss is in bits per id."""
    model = LM(config.model, jnp.dtype(config.dtype))
    teacher, target_params = target or (None, None)

    def loss(
        params: ArrayTree, key: Array, rows: Array, target_params: ArrayTree
    ) -> tuple[Array, Array]:
        shown = view(model, key, rows)
        logits = model.forward(params, shown.seen)
        if teacher is None:
            bits = cross_entropy(shown, logits)
        else:
            bits = divergence(shown, teacher.forward(target_params, shown.seen), logits)
        return bits, bits

    return Learning(
        lambda step: config.data.batch(step, config.batch, seed=config.seed),
        lambda _, state, rows: descend(config, loss, state, rows, target_params),
    )


def view(model: LM, key: Array, rows: Array) -> View:
    """Returns the training view of rows [B, L]; the key determines what is masked."""
    if model.config.causal:
        return causal_view(rows)
    rates, hide = jax.random.split(key)
    return masked_view(
        rows, mask_rates(rates, len(rows)), hide, model.config.mask_ids[0]
    )


def causal_view(rows: Array) -> View:
    """Has every place but the last predict the next id."""
    length = rows.shape[1]
    weight = jnp.where(jnp.arange(length) < length - 1, 1 / (length - 1), 0.0)
    return View(rows, jnp.roll(rows, -1, axis=1), jnp.broadcast_to(weight, rows.shape))


def mask_rates(key: Array, count: int) -> Array:
    """Draws `count` rates, each U(0, 1] and evenly spread together: their mean loss is
    less noisy."""
    return (jnp.arange(count) + 1 - jax.random.uniform(key)) / count


def masked_view(rows: Array, rates: Array, key: Array, mask_id: int) -> View:
    """Masks each id of row b with probability rates[b]."""
    hidden = jax.random.uniform(key, rows.shape) < rates[:, None]
    weight = hidden / rates[:, None] / rows.shape[1]
    return View(jnp.where(hidden, mask_id, rows), rows, weight)


def cross_entropy(view: View, logits: Array) -> Array:
    """Returns the bits per id of the wanted ids under logits [B, L, V]."""
    log_p = jnp.take_along_axis(
        jax.nn.log_softmax(logits), view.wanted[..., None], axis=-1
    )
    return _mean(view, -log_p[..., 0])


def divergence(view: View, target: Array, draft: Array) -> Array:
    """Returns KL(target || draft) in bits per id, given logits [B, L, V]."""
    log_p = jax.nn.log_softmax(target)
    log_q = jax.nn.log_softmax(draft)
    return _mean(view, jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))


def _mean(view: View, nats: Array) -> Array:
    return jnp.sum(view.weight * nats) / len(nats) / math.log(2)


def measure(
    texts: Texts,
    model: LM,
    params: ArrayTree,
    target: LM | None = None,
    target_params: ArrayTree = None,
) -> dict[str, float]:
    """Measures a model q on adjacent rows of held-out text, and beside a target p; an
    incomplete last batch is left out.

    held_out_bits_per_byte: its loss; the few ends of texts count as bytes. Of a
        masked-diffusion model it is an estimate of the bound, from fixed masks with
        evenly spaced rates.
    acceptance: sum_x min(p(x), q(x)), the probability that speculative sampling accepts
        one draft.
    greedy: fraction of predictions with the same most likely id.
    divergence: KL(p || q) in bits per id.
    """
    stream = texts.streams["held-out"]
    length = texts.length
    count = min(_TOGETHER, len(stream) // length)
    rows = stream[: len(stream) // (count * length) * count * length].reshape(
        -1, count, length
    )
    found = [
        _measured(
            model, params, target, target_params, seed_key(i), some.astype(np.int32)
        )
        for i, some in enumerate(rows)
    ]
    return {
        name: round(float(np.mean([each[name] for each in found])), 4)
        for name in found[0]
    }


@functools.partial(jax.jit, static_argnames=("model", "target"))
def _measured(
    model: LM,
    params: ArrayTree,
    target: LM | None,
    target_params: ArrayTree,
    key: Array,
    rows: Array,
) -> dict[str, Array]:
    shown = causal_view(rows)
    if not model.config.causal:
        rates = (jnp.arange(len(rows)) + 0.5) / len(rows)
        shown = masked_view(rows, rates, key, model.config.mask_ids[0])
    q = model.forward(params, shown.seen)
    found = {"held_out_bits_per_byte": cross_entropy(shown, q)}
    if target is None:
        return found
    p = target.forward(target_params, shown.seen)
    overlap = jnp.sum(jnp.minimum(jax.nn.softmax(p), jax.nn.softmax(q)), axis=-1)
    same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
    asked = shown.weight > 0
    mean = lambda values: jnp.sum(values * asked) / jnp.maximum(jnp.sum(asked), 1)
    beside = {
        "acceptance": mean(overlap),
        "greedy": mean(same),
        "divergence": divergence(shown, p, q),
    }
    return found | beside
