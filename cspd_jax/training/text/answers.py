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

from cspd_jax import text
from cspd_jax._utils.files import fingerprint, kept_arrays
from cspd_jax.errors import UserError
from cspd_jax.networks import narrow
from cspd_jax.networks.lm import LM
from cspd_jax.text.prompts import Prompts
from cspd_jax.training.data.source import Split, shuffled
from cspd_jax.training.step import Purpose, run_key
from cspd_jax.training.text.objective import TextTeacher

Array = jax.Array
PART = 64  # rows made in one batch and stored in one file
TEMPERATURE = 0.7  # of every second row
NONE = -1  # in place of an id, after the end of an answer
_HELD_OUT_ONE_IN = 16  # prompts
_LEAST_ANSWER = 16  # ids of room for it in each row


class Taught(NamedTuple):
    """Rows with what the target had in mind at each id.

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
        network, weights = LM(teacher.config), narrow.as_read(teacher.params)
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        padded = np.stack([np.pad(prompt, (0, max(lengths) - len(prompt))) for prompt in prompts])

        def make(part: int) -> dict[str, np.ndarray]:
            chosen, greedy = _turns(part * PART + np.arange(PART), len(prompts))
            key, given = jax.random.fold_in(run_key(seed, Purpose.SAMPLES), part), lengths[chosen]
            options = text.Options(
                temperature=jnp.where(greedy, 0, TEMPERATURE),
                max_new_tokens=length - given,
                max_len=length,
            )
            asked = Prompts(padded[chosen].astype(np.int32), given)
            made, info = text.generate(key, (network, weights), asked, options=options)
            there = np.arange(length) < np.asarray(info.lengths)[:, None]
            tokens = np.where(there, made, NONE).astype(np.int32)
            found = thoughts(network, weights, np.maximum(tokens, 0), entering)
            return _stored(Taught(tokens, given, *map(np.asarray, found)))

        parts = tqdm(range(-(-count // PART)), desc="answers")
        files = [folder / f"answers_{part:05d}.npz" for part in range(len(parts))]
        self._parts = [
            _read(kept_arrays(files[part], origin, functools.partial(make, part), Taught._fields))
            for part in parts
        ]
        held_out = _turns(np.arange(len(parts) * PART), len(prompts))[0] % _HELD_OUT_ONE_IN == 0
        self._places: dict[Split, np.ndarray] = {
            "train": np.flatnonzero(~held_out),
            "held-out": np.flatnonzero(held_out),
        }

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Taught:
        """Makes batch `index` of an endless sequence of permutations of the rows."""
        places = self._places[split]
        return self._rows(places[shuffled(len(places), index, size, seed=seed, split=split)])

    def held_out(self, most: int) -> Taught:
        """Returns the rows of prompts that are not trained on, or the first `most` of them."""
        return self._rows(self._places["held-out"][:most])

    def frequencies(self, ids: int) -> np.ndarray:
        """Counts how often each of `ids` ids was answered with, in the rows that are trained on: [ids]."""
        found = np.zeros(ids, np.int64)
        for tokens, given in self._texts("train"):
            found += np.bincount(tokens[given:][tokens[given:] != NONE], minlength=ids)
        return found

    def describe(self) -> dict[str, object]:
        """Says what a checkpoint records about the text it was trained on."""
        train, held_out = (
            sum(int((tokens != NONE).sum()) for tokens, _ in self._texts(split)) for split in self._places
        )
        return {"corpus": "the target's own answers", "train_ids": train, "held_out_ids": held_out}

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
    """Says which prompt each of the rows answers, and whether greedily: prompts in turn, the held-out ones
    among themselves, too, and each of them the other way the next time."""
    prompt = row % prompts
    return prompt, (prompt + prompt // _HELD_OUT_ONE_IN + row // prompts) % 2 == 1


def _stored(made: Taught) -> dict[str, np.ndarray]:
    """Returns the arrays as a .npz file has them: it knows no bfloat16, of which it keeps the bits."""
    bits = {name: getattr(made, name).view(np.uint16) for name in ("hidden", "states")}
    return {**made._asdict(), **bits}


def _read(stored: dict[str, np.ndarray]) -> Taught:
    wide = {name: stored[name].view(ml_dtypes.bfloat16) for name in ("hidden", "states")}
    return Taught(**{**{name: stored[name] for name in Taught._fields}, **wide})


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
