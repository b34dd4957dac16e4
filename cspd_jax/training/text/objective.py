"""The objectives of language models, and bits per byte on held-out text.

A causal model predicts each id of a row from the ids before it. A masked-diffusion model sees a row in which
each id was hidden with probability t ~ U(0, 1). Its predictions of the hidden ids are weighted by 1/t, which
makes the expected loss of a row an upper bound on its negative log-likelihood (LLaDA).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cspd_jax.keys import seed_key
from cspd_jax.networks.lm import LM
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.tokenizers import END_OF_TEXT
from cspd_jax.training.config import TextTrainConfig
from cspd_jax.training.run import Metrics, Purpose, TrainState, descend, run_key

Array = jax.Array


class View(NamedTuple):
    """What a model is shown of rows, and what it must predict.

    seen: [B, L] int, the ids it reads.
    wanted: [B, L] int, the ids it should predict.
    weight: [B, L], of each prediction; the weighted sum over a row is its loss per id.
    """

    seen: Array
    wanted: Array
    weight: Array


def view(model: LM, key: Array, rows: Array) -> View:
    """Returns the training view of rows [B, L]; the key determines what is masked."""
    if model.config.causal:
        return causal_view(rows)
    rates, hide = jax.random.split(key)
    return masked_view(rows, mask_rates(rates, len(rows)), hide, model.config.mask_ids[0])


def causal_view(rows: Array) -> View:
    """Has every place but the last predict the next id."""
    length = rows.shape[1]
    weight = jnp.where(jnp.arange(length) < length - 1, 1 / (length - 1), 0.0)
    return View(rows, jnp.roll(rows, -1, axis=1), jnp.broadcast_to(weight, rows.shape))


def mask_rates(key: Array, count: int) -> Array:
    """Draws `count` rates, each U(0, 1] and evenly spread together: their mean loss is less noisy."""
    return (jnp.arange(count) + 1 - jax.random.uniform(key)) / count


def masked_view(rows: Array, rates: Array, key: Array, mask_id: int) -> View:
    """Masks each id of row b with probability rates[b]."""
    hidden = jax.random.uniform(key, rows.shape) < rates[:, None]
    weight = hidden / rates[:, None] / rows.shape[1]
    return View(jnp.where(hidden, mask_id, rows), rows, weight)


def within(view: View, ids: int) -> View:
    """Returns the view for a model that has the first `ids` ids only.

    It reads any other id as the last of them, as in generation, and is not asked for one.
    """
    known = view.wanted < ids
    return View(jnp.minimum(view.seen, ids - 1), jnp.minimum(view.wanted, ids - 1), view.weight * known)


def cross_entropy(view: View, logits: Array) -> Array:
    """Returns the bits per id of the wanted ids under logits [B, L, V]."""
    return _mean(view, -at_ids(jax.nn.log_softmax(logits), view.wanted))


def divergence(view: View, target: Array, draft: Array) -> Array:
    """Returns KL(target || draft) in bits per id, given logits [B, L, V] and [B, L, n] of the first n ids.

    Where the draft lacks ids it is P KL(p / P || q), P = sum_x p(x) over those it has. The gradient is that
    of the plain sum of p log(p / q), so a place where little can be accepted weighs little; the least is 0.
    """
    log_p, log_q = jax.nn.log_softmax(target)[..., : draft.shape[-1]], jax.nn.log_softmax(draft)
    p = jnp.exp(log_p)
    all_known = jnp.sum(p, axis=-1)
    missing = jax.scipy.special.xlogy(all_known, all_known)
    return _mean(view, jnp.sum(p * (log_p - log_q), axis=-1) - missing)


def _mean(view: View, nats: Array) -> Array:
    return jnp.sum(view.weight * nats) / len(nats) / math.log(2)


def at_ids(values: Array, ids: Array) -> Array:
    """Takes values [..., V] at ids [...]."""
    return jnp.take_along_axis(values, ids[..., None], axis=-1)[..., 0]


@functools.partial(jax.jit, static_argnames=("config", "target"), donate_argnames=("state",))
def text_step(
    config: TextTrainConfig,
    state: TrainState,
    rows: Array,
    target: LMConfig | None = None,
    target_params: Any = None,
) -> tuple[TrainState, Metrics]:
    """Takes one step on rows [B, L], from the data or towards a target. The loss is in bits per id.

    With a target the loss is (1 - share) KL(target || model) + share * cross-entropy, share = `data_share`.
    """
    dtype = jnp.dtype(config.dtype)
    model, share = LM(config.model, dtype), config.data_share
    shown = view(model, jax.random.fold_in(run_key(config.seed, Purpose.STEP), state.step), rows)
    known = within(shown, config.model.vocab_size)
    teacher = None if target is None else LM(target, dtype).forward(target_params, shown.seen)

    def loss(params):
        logits = model.forward(params, known.seen)
        bits = cross_entropy(known, logits)
        if teacher is not None:
            bits = (1 - share) * divergence(shown, teacher, logits) + share * bits
        return bits, {"loss": bits}

    return descend(config, state, loss)


_TOGETHER = 16


def bits_per_byte(model: LM, params: Any, stream: np.ndarray, length: int, most: int | None = None) -> float:
    """Returns the bits per byte on a stream [N] that begins with an end-of-text id, in rows of `length`.

    A causal model predicts every id from at least half a row of context (where the stream has that much). For
    a masked-diffusion model it is an estimate of the bound, with masks that depend only on the number of
    rows, so that different models are asked the same.

    most: use at most this many rows, evenly spread.
    """
    rows, asked = (overlapping if model.config.causal else tiled)(stream, length)
    if most is not None and len(rows) > most:
        chosen = np.linspace(0, len(rows) - 1, most).round().astype(int)
        rows, asked = rows[chosen], asked[chosen]
    bits = 0.0
    ordered = mask_rates(seed_key(0), len(rows))
    rates = np.asarray(jax.random.permutation(seed_key(1), ordered))
    for start in range(0, len(rows), _TOGETHER):
        part = slice(start, start + _TOGETHER)
        padded = _TOGETHER - len(rows[part])
        filled = [
            np.pad(a[part], [(0, padded)] + [(0, 0)] * (a.ndim - 1), mode="edge") for a in (rows, rates)
        ]
        per_id = row_bits(model, params, *filled, jax.random.fold_in(seed_key(2), start))
        bits += float(np.sum(np.asarray(per_id, np.float64)[: _TOGETHER - padded] * asked[part]))
    return bits / np.sum(asked & (rows != END_OF_TEXT))


@functools.partial(jax.jit, static_argnames=("model",))
def row_bits(model: LM, params: Any, rows: Array, rates: Array, key: Array) -> Array:
    """Returns the bits of every id of rows [B, L] given those before it (0 for the first): [B, L].

    For a masked-diffusion model it is each id's part in the estimate of the bound.
    """
    if model.config.causal:
        logs = jax.nn.log_softmax(model.forward(params, rows))[:, :-1]
        nats = -at_ids(logs, rows[:, 1:])
        return jnp.pad(nats, ((0, 0), (1, 0))) / math.log(2)
    shown = masked_view(rows, rates, key, model.config.mask_ids[0])
    logs = jax.nn.log_softmax(model.forward(params, shown.seen))
    nats = -at_ids(logs, rows)
    return nats * shown.weight * rows.shape[1] / math.log(2)


def overlapping(stream: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts rows [R, length] that start every half length, and says which ids count in which row.

    Each id counts exactly once, except the stream's first, which nothing predicts.
    """
    step = length // 2
    count = max(0, -(-(len(stream) - length) // step)) + 1
    row, place = np.arange(count)[:, None], np.arange(length)
    index = row * step + place
    asked = (index > 0) & (index < len(stream)) & ((row == 0) | (place >= length - step))
    return stream[np.minimum(index, len(stream) - 1)].astype(np.int32), asked


def tiled(stream: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts adjacent rows [R, length], all of whose ids count; an incomplete last row is left out."""
    count = len(stream) // length
    rows = stream[: count * length].reshape(count, length).astype(np.int32)
    return rows, np.ones_like(rows, bool)


def agreement(
    target: LM, target_params: Any, draft: LM, draft_params: Any, rows: np.ndarray
) -> dict[str, float]:
    """Measures how close a draft q is to the target p on rows [N, L]; an incomplete last batch is left out.

    acceptance: sum_x min(p(x), q(x)), the probability that speculative sampling accepts one draft.
    greedy: fraction of predictions with the same most likely id.
    divergence: KL(p || q) in bits per id.
    """
    count = max(1, len(rows) // _TOGETHER)
    found = [
        _agreement(target, target_params, draft, draft_params, seed_key(i), part)
        for i, part in enumerate(np.array_split(rows[: count * _TOGETHER], count))
    ]
    return {name: round(float(np.mean([each[name] for each in found])), 4) for name in found[0]}


@functools.partial(jax.jit, static_argnames=("target", "draft"))
def _agreement(target: LM, target_params: Any, draft: LM, draft_params: Any, key: Array, rows: Array):
    shown = view(target, key, rows)
    p = target.forward(target_params, shown.seen)
    q = draft.forward(draft_params, within(shown, draft.config.vocab_size).seen)
    overlap = jnp.sum(jnp.minimum(jax.nn.softmax(p)[..., : q.shape[-1]], jax.nn.softmax(q)), axis=-1)
    same, asked = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1), shown.weight > 0
    mean = lambda values: jnp.sum(values * asked) / jnp.maximum(jnp.sum(asked), 1)
    return {"acceptance": mean(overlap), "greedy": mean(same), "divergence": divergence(shown, p, q)}
