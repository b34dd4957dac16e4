"""Rows that a target wrote, made once and kept: continuations of the data, and answers to prompts.

With answers the states are kept that the target had as it wrote them, so that training a head on them costs
no pass of the target, and of its parameters only those that make logits.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm import tqdm

from cspd_jax import text
from cspd_jax._utils.files import fingerprint, kept_arrays
from cspd_jax.check import UserError
from cspd_jax.language_models import Prompts
from cspd_jax.networks.lm import LM
from cspd_jax.training.data.source import Split, shuffled
from cspd_jax.training.data.text import Texts
from cspd_jax.training.run import Purpose, Teacher, run_key

Array = jax.Array
PART = 64  # rows made in one batch and stored in one file
PROMPT = 32  # ids from the data at the start of a continuation
TEMPERATURE = 0.7  # of every second answer
NONE = -1  # in place of an id, after the end of an answer
_HELD_OUT_ONE_IN = 16  # prompts
_LEAST_ANSWER = 16  # ids of room for it in each row


class Taught(NamedTuple):
    """Answers with what the target had in mind at each id.

    tokens: [B, L] ids: a prompt and its answer, then -1 if the answer ended before the row.
    given: [B] ids of the prompt.
    total: [B, L] the logarithm of the sum over all ids of exp(logit).
    hidden: [B, L, D] the target's hidden states after its last norm, in bfloat16.
    states: [B, L, S D] what entered the S layers asked for, in bfloat16.
    """

    tokens: Any
    given: Any
    total: Any
    hidden: Any
    states: Any


class TargetRows:
    """Keeps `count` rows that a target wrote, made once, in `folder`, part by part.

    make: part -> arrays of `PART` rows.
    origin: a fingerprint of all that they depend on.
    held_out: numbers of rows -> which of them are not trained on.
    """

    def __init__(
        self,
        make: Callable[[int], tuple[Any, ...]],
        count: int,
        folder: pathlib.Path,
        origin: str,
        held_out: Callable[[np.ndarray], np.ndarray] = lambda rows: rows < 0,
    ):
        folder.mkdir(parents=True, exist_ok=True)

        def made(part: int) -> tuple[np.ndarray, ...]:
            path = folder / f"rows_{part:05d}.npz"
            stored = kept_arrays(path, origin, lambda: {str(i): _bits(a) for i, a in enumerate(make(part))})
            return tuple(_from_bits(array) for array in stored.values())

        print(f"the target writes {count} rows, unless {folder} has them", file=sys.stderr)
        parts = tqdm(range(-(-count // PART)), desc="rows", disable=not sys.stderr.isatty())
        self._parts = [made(part) for part in parts]
        out = held_out(np.arange(len(self._parts) * PART))
        self._places: dict[Split, np.ndarray] = {
            "train": np.flatnonzero(~out),
            "held-out": np.flatnonzero(out),
        }

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> tuple[Any, ...]:
        """Makes batch `index` of an endless sequence of permutations of the rows."""
        places = self._places[split]
        return self._rows(places[shuffled(len(places), index, size, seed=seed, split=split)])

    def held_out(self, most: int) -> tuple[Any, ...]:
        """Returns the first `most` rows that are not trained on."""
        return self._rows(self._places["held-out"][:most])

    def answered(self, split: Split) -> np.ndarray:
        """Returns the ids of all answers of a split, one after the other."""
        found = []
        for place in self._places[split]:
            tokens, given = (array[place % PART] for array in self._parts[place // PART][:2])
            found.append(tokens[given:][tokens[given:] != NONE])
        return np.concatenate(found)

    def _rows(self, places: np.ndarray) -> tuple[Any, ...]:
        rows = [[array[place % PART] for array in self._parts[place // PART]] for place in places]
        return tuple(map(np.stack, zip(*rows)))


def _bits(array: Any) -> np.ndarray:
    """Returns an array as a .npz file has it, which knows no bfloat16 and keeps its bits."""
    array = np.asarray(array)
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def _from_bits(array: np.ndarray) -> np.ndarray:
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array


def continuations(
    teacher: Teacher, texts: Texts, count: int, folder: pathlib.Path, seed: int = 0
) -> TargetRows:
    """Returns rows that begin with the data and are continued by the target: tokens [B, L]."""
    if not teacher.config.causal:
        raise UserError("a masked-diffusion target is distilled on data; leave out --from")

    def make(part: int) -> tuple[Any, ...]:
        key = jax.random.fold_in(run_key(seed, Purpose.SAMPLES), part)
        rows = texts.batch(part, PART, seed=seed)
        return (continued(LM(teacher.config), teacher.params, key, rows),)

    return TargetRows(make, count, folder, fingerprint(*teacher, seed, texts.config.length))


@functools.partial(jax.jit, static_argnames=("model",))
def continued(model: LM, params: Any, key: Array, rows: Array) -> Array:
    """Returns rows [B, L] with all ids after the first `PROMPT` drawn from the model."""
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


def check_prompts(prompts: Sequence[Sequence[int]], length: int) -> None:
    """Raises UserError unless some prompts can be held out, and each leaves room for an answer."""
    longest = length - _LEAST_ANSWER
    if len(prompts) < _HELD_OUT_ONE_IN or not all(0 < len(prompt) <= longest for prompt in prompts):
        raise UserError(
            f"at least {_HELD_OUT_ONE_IN} prompts of 1 to {longest} ids are needed: rows have {length}"
            f" (data.length); there are {len(prompts)}, the longest of {max(map(len, prompts), default=0)}"
        )


def answers(
    teacher: Teacher,
    prompts: Sequence[Sequence[int]],
    length: int,
    count: int,
    folder: pathlib.Path,
    entering: tuple[int, ...],
    seed: int = 0,
) -> TargetRows:
    """Returns rows, as fields of `Taught`, that begin with the prompts in turn and are continued by the
    target.

    Every second row is drawn at `TEMPERATURE`, the others are greedy: a drafter is used in both ways. One
    prompt in 16 is held out, with all its rows.
    """
    network, weights = LM(teacher.config), teacher.params
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.stack([np.pad(prompt, (0, max(lengths) - len(prompt))) for prompt in prompts])

    def make(part: int) -> tuple[Any, ...]:
        chosen, greedy = _turns(part * PART + np.arange(PART), len(prompts))
        key, given = jax.random.fold_in(run_key(seed, Purpose.SAMPLES), part), lengths[chosen]
        options = text.Options(
            temperature=jnp.where(greedy, 0, TEMPERATURE), max_new_tokens=length - given, max_len=length
        )
        asked = Prompts(padded[chosen].astype(np.int32), given)
        made, info = text.generate(key, (network, weights), asked, options=options)
        there = np.arange(length) < np.asarray(info.trace.lengths)[:, None]
        tokens = np.where(there, made, NONE).astype(np.int32)
        return tokens, given, *thoughts(network, weights, np.maximum(tokens, 0), entering)

    told = [list(prompt) for prompt in prompts], list(entering), TEMPERATURE, _HELD_OUT_ONE_IN
    origin = fingerprint(*teacher, seed, length, *told)
    held_out = lambda rows: _turns(rows, len(prompts))[0] % _HELD_OUT_ONE_IN == 0
    return TargetRows(make, count, folder, origin, held_out)


def _turns(row: np.ndarray, prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Says which prompt each of the rows answers, and whether greedily: prompts in turn, the held-out ones
    among themselves, too, and each of them the other way the next time."""
    prompt = row % prompts
    return prompt, (prompt + prompt // _HELD_OUT_ONE_IN + row // prompts) % 2 == 1


@functools.partial(jax.jit, static_argnames=("model", "entering"))
def thoughts(model: LM, params: Any, rows: Array, entering: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Returns what a model has in mind as it reads rows [B, L]: the last three fields of `Taught`."""

    def of_row(row: Array) -> tuple[Array, Array, Array]:
        at, cache = jnp.arange(len(row))[None], model.empty_cache(1, len(row))
        hidden, _, states = model.hidden(params, row[None], at, cache, entering)
        logits = model.logits(params, hidden)[0, :, : model.config.known_ids]
        narrow = jnp.bfloat16
        return jax.nn.logsumexp(logits, axis=-1), hidden[0].astype(narrow), states[0].astype(narrow)

    return jax.lax.map(of_row, rows)
