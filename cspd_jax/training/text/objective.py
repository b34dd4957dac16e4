"""The training objectives of language models, and measurements on held-out text.

A causal model predicts each id of a row from the ids before it. A masked-diffusion
model sees a row in which each id is hidden with probability t ~ U(0, 1). Its
predictions of the hidden ids are weighted by 1/t. With this weight the expected loss of
a row is an upper bound on its negative log-likelihood (LLaDA). If the model is causal
between blocks, the hidden ids of a block are predicted from the block and from all ids
of the blocks before it (SDAR).
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
_TOGETHER = 16  # rows per batch of a measurement


class View(NamedTuple):
    """The ids that a model reads and the ids that it must predict.

    seen: [B, L] int, the ids that the model reads.
    wanted: [B, L] int, the id to predict at each place.
    weight: [B, L] the weight of each prediction. The weighted sum over a row is the
        loss of the row per id.
    """

    seen: Array
    wanted: Array
    weight: Array


def learning(config: RunConfig, target: tuple[LM, ArrayTree] | None = None) -> Learning:
    """Returns the `Learning` of a language model, which learns rows of text. With a
    target, the model learns the target's predictions on these rows. The loss is in bits
    per id."""
    model = LM(config.model, jnp.dtype(config.dtype))
    teacher, target_params = target or (None, None)

    def loss(
        params: ArrayTree, key: Array, rows: Array, target_params: ArrayTree
    ) -> tuple[Array, Array]:
        shown = view(model, key, rows)
        logits = predicted(model, params, shown, rows)
        if teacher is None:
            bits = cross_entropy(shown, logits)
        else:
            target = predicted(teacher, target_params, shown, rows)
            bits = divergence(shown, target, logits)
        return bits, bits

    return Learning(
        lambda step: config.data.batch(step, config.batch, seed=config.seed),
        lambda _, state, rows: descend(config, loss, state, rows, target_params),
    )


def view(model: LM, key: Array, rows: Array) -> View:
    """Returns the training view of rows [B, L]. The key decides which ids a
    masked-diffusion model does not see."""
    if model.config.causal:
        return causal_view(rows)
    rates, hide = jax.random.split(key)
    return masked_view(
        rows, mask_rates(rates, len(rows)), hide, model.config.mask_ids[0]
    )


def predicted(model: LM, params: ArrayTree, shown: View, rows: Array) -> Array:
    """Returns the logits [B, L, V] of a model for the view of rows [B, L]."""
    if model.config.block:
        return model.denoise(params, shown.seen, rows)
    return model.forward(params, shown.seen)


def causal_view(rows: Array) -> View:
    """Returns the view of rows [B, L] in which every place except the last predicts the
    next id."""
    length = rows.shape[1]
    weight = jnp.where(jnp.arange(length) < length - 1, 1 / (length - 1), 0.0)
    return View(rows, jnp.roll(rows, -1, axis=1), jnp.broadcast_to(weight, rows.shape))


def mask_rates(key: Array, count: int) -> Array:
    """Returns [count], mask rates in (0, 1] that are evenly spaced and begin at a
    random offset. A rate that is picked at random among them is distributed as U(0, 1].
    Even spacing makes the mean loss of the rows less noisy."""
    return (jnp.arange(count) + 1 - jax.random.uniform(key)) / count


def masked_view(rows: Array, rates: Array, key: Array, mask_id: int) -> View:
    """Returns the view of rows [B, L] in which each id of row b is masked with
    probability rates[b]. `rates` is [B]."""
    hidden = jax.random.uniform(key, rows.shape) < rates[:, None]
    weight = hidden / rates[:, None] / rows.shape[1]
    return View(jnp.where(hidden, mask_id, rows), rows, weight)


def cross_entropy(view: View, logits: Array) -> Array:
    """Returns the cross-entropy [] of the wanted ids under logits [B, L, V], in bits
    per id."""
    log_p = jnp.take_along_axis(
        jax.nn.log_softmax(logits), view.wanted[..., None], axis=-1
    )
    return _mean(view, -log_p[..., 0])


def divergence(view: View, target: Array, draft: Array) -> Array:
    """Returns KL(target || draft) [] in bits per id, for the logits [B, L, V] of the
    target and of the draft."""
    log_p = jax.nn.log_softmax(target)
    log_q = jax.nn.log_softmax(draft)
    return _mean(view, jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))


def _mean(view: View, nats: Array) -> Array:
    """Returns [], the mean loss of the rows in bits per id, from nats [B, L]."""
    return jnp.sum(view.weight * nats) / len(nats) / math.log(2)


def measure(
    texts: Texts,
    model: LM,
    params: ArrayTree,
    target: LM | None = None,
    target_params: ArrayTree = None,
) -> dict[str, float]:
    """Measures a model q on adjacent rows of held-out text, and compares it with a
    target p if there is one. An incomplete last batch is left out. Returns:

    held_out_bits_per_byte: the loss of q, where each end of a text counts as a byte.
        For a masked-diffusion model it is an estimate of the bound, from fixed masks
        with evenly spaced rates.
    acceptance: sum_x min(p(x), q(x)), the probability that speculative sampling accepts
        one draft.
    greedy: the share of the predictions for which p and q have the same most probable
        id.
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
    q = predicted(model, params, shown, rows)
    found = {"held_out_bits_per_byte": cross_entropy(shown, q)}
    if target is None:
        return found
    p = predicted(target, target_params, shown, rows)
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
