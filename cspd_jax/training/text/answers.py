"""Rows that a target wrote in answer to prompts, kept with the states that it had as it wrote them.

What the target thinks of its own text is known when the text is made. Its states are kept, so that training
on them costs no pass of the target, and of its parameters only those that make logits.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm import tqdm

from cspd_jax._utils.files import fingerprint, kept_arrays
from cspd_jax.errors import UserError
from cspd_jax.networks import narrow
from cspd_jax.networks.lm import LM
from cspd_jax.training.data.source import Split, shuffled
from cspd_jax.training.step import Purpose, run_key
from cspd_jax.training.text.objective import TextTeacher

Array = jax.Array
PART = 64  # rows made in one batch and stored in one file
TEMPERATURE = 0.7  # of every second row
NONE = -1  # in place of an id, after the end of an answer
_HELD_OUT_ONE_IN = 16  # prompts
_LEAST_ANSWER = 16  # ids of room for it in each row
_BLOCK = 256  # ids that are summed up together to draw one


class Taught(NamedTuple):
    """Rows with what the target had in mind at each id.

    tokens: [B, L] ids: a prompt and its answer, then -1 if the answer ended before the row.
    given: [B] ids of the prompt.
    total: [B, L] the logarithm of the sum over all ids of exp(logit); 0 where all rows read their prompts.
    hidden: [B, L, D] the target's hidden states after its last norm, in bfloat16.
    states: [B, L, S D] what entered the S layers asked for, in bfloat16.
    """

    tokens: Any
    given: Any
    total: Any
    hidden: Any
    states: Any


class Answers:
    """`count` rows that begin with the prompts in turn and are continued by the target; made once, kept in
    `folder`, part by part.

    Every second row is drawn at `TEMPERATURE`, the others are greedy: a drafter is used in both ways. One
    prompt in 16 is held out, with all its rows.
    """

    def __init__(
        self,
        teacher: TextTeacher,
        prompts: Sequence[Sequence[int]],
        length: int,
        count: int,
        folder: pathlib.Path,
        entering: tuple[int, ...],
        seed: int = 0,
    ):
        check_prompts(prompts, length)
        folder.mkdir(parents=True, exist_ok=True)
        told = [list(prompt) for prompt in prompts], list(entering), TEMPERATURE, _HELD_OUT_ONE_IN
        origin = fingerprint(*teacher, seed, length, *told)
        network, ends = LM(teacher.config), np.array(teacher.config.eos_ids, np.int32)
        weights = narrow.as_read(teacher.params)
        begin = min(len(prompt) for prompt in prompts)

        def make(part: int) -> dict[str, np.ndarray]:
            chosen, greedy = _turns(part * PART + np.arange(PART), len(prompts))
            rows, given = np.zeros((PART, length), np.int32), np.zeros(PART, np.int32)
            for row, index in enumerate(chosen):
                given[row] = len(prompts[index])
                rows[row, : given[row]] = prompts[index]
            key = jax.random.fold_in(run_key(seed, Purpose.SAMPLES), part)
            temperature = np.where(greedy, 0, TEMPERATURE).astype(np.float32)
            made = answered(network, weights, key, rows, given, temperature, entering, begin)
            made = Taught(*map(np.asarray, made))
            return _stored(made._replace(tokens=_ended(made.tokens, given, ends)))

        parts = tqdm(range(-(-count // PART)), desc="answers")
        self._parts = [
            _read(
                kept_arrays(
                    folder / f"answers_{i:05d}.npz", origin, functools.partial(make, i), Taught._fields
                )
            )
            for i in parts
        ]
        held_out = _turns(np.arange(len(parts) * PART), len(prompts))[0] % _HELD_OUT_ONE_IN == 0
        self._places: dict[Split, np.ndarray] = {
            "train": np.flatnonzero(~held_out),
            "held-out": np.flatnonzero(held_out),
        }

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Taught:
        """Batch `index` of an endless sequence of permutations of the rows."""
        places = self._places[split]
        return self._rows(places[shuffled(len(places), index, size, seed=seed, split=split)])

    def held_out(self, most: int) -> Taught:
        """The rows of prompts that are not trained on, or the first `most` of them."""
        return self._rows(self._places["held-out"][:most])

    def frequencies(self, ids: int) -> np.ndarray:
        """How often each of `ids` ids was answered with, in the rows that are trained on: [ids]."""
        found = np.zeros(ids, np.int64)
        for tokens, given in self._texts("train"):
            found += np.bincount(tokens[given:][tokens[given:] != NONE], minlength=ids)
        return found

    def describe(self) -> dict[str, object]:
        """What a checkpoint records about the text it was trained on."""
        ids = {
            split: sum(int((tokens != NONE).sum()) for tokens, _ in self._texts(split))
            for split in self._places
        }
        return {
            "corpus": "the target's own answers",
            "train_ids": ids["train"],
            "held_out_ids": ids["held-out"],
        }

    def _texts(self, split: Split):
        for place in self._places[split]:
            part = self._parts[place // PART]
            yield part.tokens[place % PART], part.given[place % PART]

    def _rows(self, places: np.ndarray) -> Taught:
        rows = [[array[place % PART] for array in self._parts[place // PART]] for place in places]
        return Taught(*map(np.stack, zip(*rows)))


def check_prompts(prompts: Sequence[Sequence[int]], length: int) -> None:
    """Raises UserError unless some prompts can be held out, and each leaves room for an answer."""
    if len(prompts) < _HELD_OUT_ONE_IN:
        raise UserError(
            f"there are {len(prompts)} prompts; at least {_HELD_OUT_ONE_IN} are needed, of which one is held"
            " out"
        )
    for number, prompt in enumerate(prompts, start=1):
        if not 0 < len(prompt) <= length - _LEAST_ANSWER:
            raise UserError(
                f"prompt {number} has {len(prompt)} ids; rows of {length} (data.length) hold prompts of 1 to"
                f" {length - _LEAST_ANSWER}"
            )


def _turns(row: np.ndarray, prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Which prompt each of the rows answers, and whether greedily: prompts in turn, the held-out ones among
    themselves, too, and each of them the other way the next time."""
    prompt = row % prompts
    return prompt, (prompt + prompt // _HELD_OUT_ONE_IN + row // prompts) % 2 == 1


def _ended(tokens: np.ndarray, given: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """tokens [B, L] without what follows the first of the ids `ends` in each answer."""
    place = np.arange(tokens.shape[1])
    ending = np.isin(tokens, ends) & (place >= given[:, None])
    return np.where(np.cumsum(ending, axis=1) - ending > 0, NONE, tokens).astype(np.int32)


def _stored(made: Taught) -> dict[str, np.ndarray]:
    """The arrays as a .npz file has them: it knows no bfloat16, of which it keeps the bits."""
    bits = {name: getattr(made, name).view(np.uint16) for name in ("hidden", "states")}
    return {**made._asdict(), **bits}


def _read(stored: dict[str, np.ndarray]) -> Taught:
    wide = {name: stored[name].view(ml_dtypes.bfloat16) for name in ("hidden", "states")}
    return Taught(**{**{name: stored[name] for name in Taught._fields}, **wide})


@functools.partial(jax.jit, static_argnames=("model", "entering", "begin"))
def answered(
    model: LM,
    params: Any,
    key: Array,
    rows: Array,
    given: Array,
    temperature: Array,
    entering: tuple[int, ...],
    begin: int = 1,
) -> Taught:
    """rows [B, L], of which the first `given` [B] ids stay; the others are the model's at temperature [B], 0
    for greedy ones.

    begin: so many ids are given in every row, which are read together; no `total` is made before the last.
    """
    batch, length = rows.shape
    read, greedy = begin - 1, temperature == 0
    blank = lambda *shape: jnp.zeros((batch, length, *shape), jnp.bfloat16)
    width, tokens = model.config.width, rows
    kept = Taught(tokens, given, jnp.zeros((batch, length)), blank(width), blank(len(entering) * width))

    def put(kept: Taught, hidden: Array, states: Array, position: Any) -> Taught:
        at = lambda array, new: jax.lax.dynamic_update_slice_in_dim(
            array, new.astype(array.dtype), position, 1
        )
        return kept._replace(hidden=at(kept.hidden, hidden), states=at(kept.states, states))

    def step(position, carry):
        kept, cache = carry
        at = jnp.full((batch, 1), position)
        previous = jax.lax.dynamic_slice_in_dim(kept.tokens, position, 1, 1)
        hidden, cache, states = model.hidden(params, previous, at, cache, entering)
        logits = model.logits(params, hidden)[:, 0, : model.config.known_ids]
        drawn = _drawn(jax.random.fold_in(key, position), logits, jnp.where(greedy, 1, temperature))
        drawn = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn).astype(rows.dtype)
        following = jnp.minimum(position + 1, length - 1)
        there = (position + 1 < given) | (position + 1 == length)
        kept = put(kept, hidden, states, position)
        tokens = kept.tokens.at[:, following].set(jnp.where(there, kept.tokens[:, following], drawn))
        total = kept.total.at[:, position].set(jax.nn.logsumexp(logits, axis=-1))
        return kept._replace(tokens=tokens, total=total), cache

    cache = model.empty_cache(batch, length)
    if read:
        at = jnp.broadcast_to(jnp.arange(read), (batch, read))
        hidden, cache, states = model.hidden(params, rows[:, :read], at, cache, entering)
        kept = put(kept, hidden, states, 0)
    return jax.lax.fori_loop(read, length, step, (kept, cache))[0]


def _drawn(key: Array, logits: Array, temperature: Array) -> Array:
    """Ids [B] drawn from logits [B, V] at temperature [B], each by one uniform number, which is looked up in
    two steps: among sums of blocks, and within a block."""
    warm = logits / temperature[:, None]
    p = jnp.exp(warm - jnp.max(warm, axis=-1, keepdims=True))
    p = jnp.pad(p, ((0, 0), (0, -p.shape[1] % _BLOCK))).reshape(len(p), -1, _BLOCK)
    blocks = jnp.cumsum(jnp.sum(p, axis=-1), axis=-1)
    wanted = jax.random.uniform(key, (len(p), 1)) * blocks[:, -1:]
    block = jnp.minimum(jnp.sum(blocks <= wanted, axis=-1), blocks.shape[1] - 1)
    rows = jnp.arange(len(p))
    before = jnp.where(block > 0, blocks[rows, block - 1], 0)
    sums = before[:, None] + jnp.cumsum(p[rows, block], axis=-1)
    inside = jnp.minimum(jnp.sum(sums <= wanted, axis=-1), _BLOCK - 1)
    return jnp.minimum(block * _BLOCK + inside, logits.shape[1] - 1)
