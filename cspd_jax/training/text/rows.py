"""Rows that a target generates, which are made once and stored in a file: continuations
of the data, and answers to prompts.

Answers are stored together with the target's states. So the training of a head makes no
pass of the target, and needs only the target's parameters that make logits.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from chex import Array, ArrayTree
from tqdm import tqdm

from cspd_jax import text
from cspd_jax._utils.files import write_arrays
from cspd_jax.check import UserError
from cspd_jax.language_models import Prompts
from cspd_jax.networks.lm import LM
from cspd_jax.parallel import first_alone
from cspd_jax.training.data.text import Texts
from cspd_jax.training.run import SAMPLES, run_key

PART = 64  # rows that are generated in one batch
PROMPT = 32  # ids from the data at the start of a continuation
TEMPERATURE = 0.7  # the temperature of every second answer
NONE = -1  # stands in place of an id after the end of an answer


class Taught(NamedTuple):
    """Answers, with the target's states at each id.

    tokens: [B, L] the ids of a prompt and its answer, and -1 after the end of the
        answer.
    given: [B] the number of ids in the prompt.
    total: [B, L] the logarithm of the sum over all ids of exp(logit).
    hidden: [B, L, D] the target's hidden states after its last norm, in bfloat16.
    states: [B, L, S D] the inputs of S chosen layers, side by side, in bfloat16.
    """

    tokens: Array
    given: Array
    total: Array
    hidden: Array
    states: Array

    def rows(self, which: Array | slice) -> Taught:
        """Returns the rows with the indices `which` [N], as a `Taught` of N rows."""
        return Taught(*(array[which] for array in self))

    @property
    def answered(self) -> np.ndarray:
        """[N] the ids of all answers, one answer after the other."""
        place = np.arange(self.tokens.shape[1])
        return self.tokens[(place >= self.given[:, None]) & (self.tokens != NONE)]


def kept(
    path: pathlib.Path, count: int, make: Callable[[int], Sequence[Array]]
) -> list[np.ndarray]:
    """Returns arrays [N, ...] with at least `count` rows, from the file `path`. If the
    file does not exist, the rows are first made and written.

    make: a function of the part's number. It returns arrays with `PART` rows.
    """
    with first_alone("the rows are written"):
        if not path.exists():
            parts = [
                make(part)
                for part in tqdm(range(-(-count // PART)), desc="rows", disable=None)
            ]
            write_arrays(
                path,
                **{str(i): np.concatenate(each) for i, each in enumerate(zip(*parts))},
            )
        with np.load(path) as file:
            stored = [file[name] for name in file.files]
    # An .npz file does not know the type bfloat16, but it stores the bits.
    return [
        array.view(ml_dtypes.bfloat16) if array.dtype.kind == "V" else array
        for array in stored
    ]


def continuations(
    target: tuple[LM, ArrayTree],
    texts: Texts,
    count: int,
    path: pathlib.Path,
    seed: int,
) -> np.ndarray:
    """Returns rows [N, L], each of which begins with ids of the data and is continued
    by the target. They are stored in the file `path`."""
    if not target[0].config.causal:
        raise UserError(
            "a masked-diffusion target is distilled on data; leave out --from"
        )
    options = text.Options(
        temperature=1.0,
        max_new_tokens=texts.length - PROMPT,
        max_len=texts.length,
        stop_ids=(),
    )

    def make(part: int) -> Sequence[Array]:
        key = jax.random.fold_in(run_key(seed, SAMPLES), part)
        begun = Prompts(
            texts.batch(part, PART, seed=seed)[:, :PROMPT], np.full(PART, PROMPT)
        )
        return (text.generate(key, target, begun, options=options).tokens,)

    return kept(path, count, make)[0]


def answers(
    target: tuple[LM, ArrayTree],
    prompts: Sequence[Sequence[int]],
    length: int,
    count: int,
    path: pathlib.Path,
    entering: tuple[int, ...],
    seed: int = 0,
) -> Taught:
    """Returns rows that begin with the prompts in turn and are continued by the target.
    They are stored in the file `path`.

    Drafters are used both for sampling and for greedy decoding. So every second row is
    drawn at `TEMPERATURE`, and the rows between are greedy. If a prompt is answered
    several times, its sampled and its greedy answers alternate.

    entering: the layers whose inputs are stored.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.stack(
        [np.pad(prompt, (0, max(lengths) - len(prompt))) for prompt in prompts]
    )

    def make(part: int) -> Sequence[Array]:
        turn, chosen = np.divmod(part * PART + np.arange(PART), len(prompts))
        key = jax.random.fold_in(run_key(seed, SAMPLES), part)
        given = lengths[chosen]
        heat = jnp.where((turn + chosen) % 2, 0, TEMPERATURE)
        new = jnp.asarray(length - given)
        options = text.Options(temperature=heat, max_new_tokens=new, max_len=length)
        asked = Prompts(padded[chosen].astype(np.int32), given)
        made, info = text.generate(key, target, asked, options=options)
        there = np.arange(length) < np.asarray(info.trace.lengths)[:, None]
        tokens = np.where(there, made, NONE).astype(np.int32)
        return tokens, given, *thoughts(*target, np.maximum(tokens, 0), entering)

    return Taught(*kept(path, count, make))


@functools.partial(jax.jit, static_argnames=("model", "entering"))
def thoughts(
    model: LM, params: ArrayTree, rows: Array, entering: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    """Returns the states of a model that reads rows [B, L]: the last three fields of
    `Taught`."""

    def of_row(row: Array) -> tuple[Array, Array, Array]:
        at = jnp.arange(len(row))[None]
        cache = model.empty_cache(1, len(row))
        hidden, _, states = model.hidden(params, row[None], at, cache, entering)
        logits = model.logits(params, hidden)[0, :, : model.config.known_ids]
        narrow = jnp.bfloat16
        return (
            jax.nn.logsumexp(logits, axis=-1),
            hidden[0].astype(narrow),
            states[0].astype(narrow),
        )

    return jax.lax.map(of_row, rows)
