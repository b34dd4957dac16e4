"""Distillation of language models: the target's own continuations as rows, and how well a draft agrees."""

from __future__ import annotations

import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from cspd_jax._utils.files import fingerprint, kept_array
from cspd_jax.errors import UserError
from cspd_jax.keys import seed_key
from cspd_jax.networks.lm import LM
from cspd_jax.training.data.source import Batches, Split, shuffled
from cspd_jax.training.data.text import Texts
from cspd_jax.training.step import Purpose, run_key
from cspd_jax.training.text.objective import TextTeacher, View, divergence, view, within

Array = jax.Array
PART = 64  # rows sampled in one batch and stored in one file
PROMPT = 32  # ids from the data at the start of each row
_TOGETHER = 16  # rows per call when agreement is measured


class TargetTexts:
    """`count` rows that begin with the data and are continued by the target; made once, kept in `folder`."""

    def __init__(self, teacher: TextTeacher, texts: Texts, count: int, folder: pathlib.Path, seed: int = 0):
        if not teacher.config.causal:
            raise UserError("a masked-diffusion target is distilled on data; leave out --from")
        folder.mkdir(parents=True, exist_ok=True)
        origin = fingerprint(*teacher, seed, texts.config.length)

        def make(part: int) -> np.ndarray:
            key = jax.random.fold_in(run_key(seed, Purpose.SAMPLES), part)
            rows = texts.batch(part, PART, seed=seed)
            return np.asarray(continued(LM(teacher.config), teacher.params, key, rows))

        parts = tqdm(range(-(-count // PART)), desc="samples")
        made = [
            kept_array(folder / f"samples_{i:05d}.npz", origin, functools.partial(make, i)) for i in parts
        ]
        self._rows = np.concatenate(made)

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> np.ndarray:
        return self._rows[shuffled(len(self._rows), index, size, seed=seed, split=split)]


@functools.partial(jax.jit, static_argnames=("model",))
def continued(model: LM, params: Any, key: Array, rows: Array) -> Array:
    """Rows [B, L] with all ids after the first `PROMPT` drawn from the model."""
    batch, length = rows.shape

    def step(carry, position):
        cache, previous = carry
        at = jnp.full((batch, 1), position)
        logits, cache = model.apply(params, previous[:, None], at, cache)
        drawn = jax.random.categorical(jax.random.fold_in(key, position), logits[:, 0])
        following = jnp.where(position + 1 < PROMPT, rows[:, jnp.minimum(position + 1, PROMPT)], drawn)
        return (cache, following.astype(rows.dtype)), following.astype(rows.dtype)

    start = model.empty_cache(batch, length), rows[:, 0]
    _, drawn = jax.lax.scan(step, start, jnp.arange(length - 1))
    return jnp.concatenate([rows[:, :1], drawn.T], axis=1)


class InTurn:
    """The batches of two sets of rows in turn."""

    def __init__(self, first: Batches, second: Batches):
        self._rows = (first, second)

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> np.ndarray:
        return self._rows[index % 2].batch(index // 2, size, seed=seed, split=split)


class Agreement(NamedTuple):
    """How close a draft q is to the target p; means over predictions.

    acceptance: sum_x min(p(x), q(x)), the probability that speculative sampling accepts one draft.
    greedy: fraction of predictions with the same most likely id.
    divergence: KL(p || q) in bits per id.
    """

    acceptance: Any
    greedy: Any
    divergence: Any


def agreement(target: LM, target_params: Any, draft: LM, draft_params: Any, rows: np.ndarray) -> Agreement:
    """The agreement on rows [N, L]; an incomplete last batch is left out."""
    count = max(1, len(rows) // _TOGETHER)
    found = [
        _agreement(target, target_params, draft, draft_params, seed_key(i), part)
        for i, part in enumerate(np.array_split(rows[: count * _TOGETHER], count))
    ]
    return Agreement(*(float(np.mean(values)) for values in zip(*found)))


@functools.partial(jax.jit, static_argnames=("target", "draft"))
def _agreement(target: LM, target_params: Any, draft: LM, draft_params: Any, key: Array, rows: Array):
    shown = view(target, key, rows)
    known = within(shown, draft.vocab_size).seen
    return compared(shown, target.forward(target_params, shown.seen), draft.forward(draft_params, known))


def compared(shown: View, p: Array, q: Array) -> Agreement:
    """The agreement of logits p [B, L, V] with q [B, L, n] of the first n ids, the only ones it drafts."""
    overlap = jnp.sum(jnp.minimum(jax.nn.softmax(p)[..., : q.shape[-1]], jax.nn.softmax(q)), axis=-1)
    same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
    return Agreement(_mean(shown, overlap), _mean(shown, same), divergence(shown, p, q))


def _mean(shown: View, values: Array) -> Array:
    """The unweighted mean over the predictions that were asked for."""
    asked = shown.weight > 0
    return jnp.sum(values * asked) / jnp.maximum(jnp.sum(asked), 1)
