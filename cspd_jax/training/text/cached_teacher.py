"""Rows that a target wrote in answer to prompts, kept with its hidden states, and distillation on them.

What the target thinks of its own text is known when the text is sampled. Its last hidden states are kept, so
that training needs only its last layer, and of that the ids of the draft: a step costs no pass of the target.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from cspd_jax._utils.files import fingerprint, kept_arrays
from cspd_jax.errors import UserError
from cspd_jax.networks.lm import LM
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.training.config import TextTrainConfig
from cspd_jax.training.data.source import Split, shuffled
from cspd_jax.training.run import RunOptions
from cspd_jax.training.step import Purpose, TrainState, descend, run_key
from cspd_jax.training.text.cut import last_part
from cspd_jax.training.text.distillation import Agreement, compared
from cspd_jax.training.text.objective import View, cross_entropy, divergence_from, within
from cspd_jax.training.text.trainer import TextMetrics, TextTeacher, train_rows

Array = jax.Array
PART = 64  # rows sampled in one batch and stored in one file
_HELD_OUT_ONE_IN = 16  # prompts
_LEAST_ANSWER = 16  # ids of room for it in each row
_NONE = -1  # in place of an id, after the end of an answer
_TOGETHER = 4  # rows per call when agreement is measured


class Taught(NamedTuple):
    """Rows with what the target predicts after each id.

    tokens: [B, L] ids: a prompt and its answer, then -1 if the answer ended before the row.
    hidden: [B, L, D] the target's hidden states after its last norm.
    total: [B, L] the logarithm of the sum over all ids of exp(logit).
    """

    tokens: Any
    hidden: Any
    total: Any


class Answers:
    """`count` rows that begin with the prompts in turn and are continued by the target; made once, kept in
    `folder`, part by part.

    Every second row is drawn at temperature 1, the others are greedy: a draft is used in both ways. One
    prompt in 16 is held out, with all its rows.
    """

    def __init__(
        self,
        teacher: TextTeacher,
        prompts: Sequence[Sequence[int]],
        length: int,
        count: int,
        folder: pathlib.Path,
        seed: int = 0,
    ):
        check_prompts(prompts, length)
        check_count(count)
        folder.mkdir(parents=True, exist_ok=True)
        origin = fingerprint(*teacher, seed, length, [list(prompt) for prompt in prompts])
        network, ends = LM(teacher.config), np.array(teacher.config.eos_ids, np.int32)

        def make(part: int) -> dict[str, np.ndarray]:
            chosen, greedy = _turns(part * PART + np.arange(PART), len(prompts))
            rows, given = np.zeros((PART, length), np.int32), np.zeros(PART, np.int32)
            for row, index in enumerate(chosen):
                given[row] = len(prompts[index])
                rows[row, : given[row]] = prompts[index]
            key = jax.random.fold_in(run_key(seed, Purpose.SAMPLES), part)
            made = Taught(*map(np.asarray, answered(network, teacher.params, key, rows, given, greedy)))
            return made._replace(tokens=_ended(made.tokens, given, ends))._asdict()

        parts = tqdm(range(-(-count // PART)), desc="samples")
        made = [
            kept_arrays(folder / f"answers_{i:05d}.npz", origin, functools.partial(make, i), Taught._fields)
            for i in parts
        ]
        self._rows = Taught(*(np.concatenate([part[name] for part in made]) for name in Taught._fields))
        held_out = _turns(np.arange(len(made) * PART), len(prompts))[0] % _HELD_OUT_ONE_IN == 0
        self._places: dict[Split, np.ndarray] = {
            "train": np.flatnonzero(~held_out),
            "held-out": np.flatnonzero(held_out),
        }

    def batch(self, index: int, size: int, *, seed: int = 0, split: Split = "train") -> Taught:
        """Batch `index` of an endless sequence of permutations of the rows."""
        places = self._places[split]
        chosen = places[shuffled(len(places), index, size, seed=seed, split=split)]
        return Taught(*(array[chosen] for array in self._rows))

    def held_out(self, most: int) -> Taught:
        """The rows of prompts that are not trained on, or the first `most` of them."""
        return Taught(*(array[self._places["held-out"][:most]] for array in self._rows))

    def describe(self) -> dict[str, object]:
        """What a checkpoint records about the text it was trained on."""
        ids = (self._rows.tokens != _NONE).sum(axis=1)
        return {
            "corpus": "the target's own answers",
            "train_ids": int(ids[self._places["train"]].sum()),
            "held_out_ids": int(ids[self._places["held-out"]].sum()),
        }

    def coverage(self, ids: int) -> float:
        """The fraction of all ids in the rows that are among the first `ids`."""
        tokens = self._rows.tokens
        return float((tokens[tokens != _NONE] < ids).mean())


def check_count(count: int) -> None:
    """UserError unless there are enough rows to learn from."""
    if count < PART:
        raise UserError(f"{count} samples are too few to learn from; ask for at least {PART}")


def check_prompts(prompts: Sequence[Sequence[int]], length: int) -> None:
    """UserError unless there are enough prompts to hold some out, and each leaves room for an answer."""
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
    """Which prompt each of the rows answers, and whether greedily; each prompt is answered in both ways."""
    return row % prompts, (row + row // prompts) % 2 == 1


def _ended(tokens: np.ndarray, given: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """tokens [B, L] without what follows the first of the ids `ends` in each answer."""
    place = np.arange(tokens.shape[1])
    ending = np.isin(tokens, ends) & (place >= given[:, None])
    return np.where(np.cumsum(ending, axis=1) - ending > 0, _NONE, tokens).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("model",))
def answered(model: LM, params: Any, key: Array, rows: Array, given: Array, greedy: Array) -> Taught:
    """rows [B, L], of which the first `given` [B] ids stay; the others are the model's, greedy [B] or not."""
    batch, length = rows.shape

    def step(carry, position):
        cache, previous = carry
        at = jnp.full((batch, 1), position)
        hidden, cache = model.hidden(params, previous[:, None], at, cache)
        logits = model.logits(params, hidden)[:, 0]
        drawn = jax.random.categorical(jax.random.fold_in(key, position), logits)
        drawn = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn).astype(rows.dtype)
        following = jnp.minimum(position + 1, length - 1)
        following = jnp.where(position + 1 < given, rows[:, following], drawn)
        return (cache, following), (previous, hidden[:, 0], jax.nn.logsumexp(logits, axis=-1))

    start = model.empty_cache(batch, length), rows[:, 0]
    _, made = jax.lax.scan(step, start, jnp.arange(length))
    return Taught(*(array.swapaxes(0, 1) for array in made))


def train_taught(
    config: TextTrainConfig,
    answers: Answers,
    out: pathlib.Path,
    head: Any,
    options: RunOptions = RunOptions(),
) -> TrainState:
    """Trains a draft on the target's answers in the folder `out`, and returns the final state.

    head: what makes logits of the draft's ids from the target's hidden states (`last_part`).
    """

    def step(state: TrainState, batch: Taught) -> tuple[TrainState, TextMetrics]:
        return taught_step(config, state, batch, head)

    return train_rows(config, answers, out, step, options)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def taught_step(
    config: TextTrainConfig, state: TrainState, batch: Taught, head: Any
) -> tuple[TrainState, TextMetrics]:
    """One optimiser step towards the target, of which `head` makes logits of the draft's ids.

    The loss is that of `text_step` with a target.
    """
    model, share, ids = LM(config.model, jnp.dtype(config.dtype)), config.data_share, config.model.vocab_size
    last = LM(config.model)

    def loss_of(batch: Taught):
        shown = taught_view(batch.tokens)
        known = within(shown, ids)
        log_p = last.logits(head, batch.hidden) - batch.total[..., None]

        def loss(params):
            logits = model.forward(params, known.seen)
            bits = (1 - share) * divergence_from(shown, log_p, logits) + share * cross_entropy(known, logits)
            return bits, bits

        return loss

    state, update = descend(config, state, loss_of, batch)
    return state, TextMetrics(update.aux, update.norm, update.rate)


def taught_view(tokens: Array) -> View:
    """Every place but the last predicts the next id of tokens [B, L], if there is one."""
    length = tokens.shape[1]
    wanted = jnp.roll(tokens, -1, axis=1)
    asked = (wanted != _NONE) & (jnp.arange(length) < length - 1)
    return View(jnp.maximum(tokens, 0), jnp.maximum(wanted, 0), asked / (length - 1))


def taught_agreement(
    target: LMConfig, target_params: Any, draft: LM, draft_params: Any, rows: Taught
) -> Agreement:
    """The agreement of a draft with the target on its answers; an incomplete last batch is left out."""
    head = last_part(target, target_params, target.vocab_size)
    size = min(_TOGETHER, len(rows.tokens))
    starts = range(0, len(rows.tokens) - size + 1, size)
    parts = [Taught(*(array[start : start + size] for array in rows)) for start in starts]
    found = [_agreement(LM(target), head, draft, draft_params, part) for part in parts]
    return Agreement(*(float(np.mean(values)) for values in zip(*found)))


@functools.partial(jax.jit, static_argnames=("target", "draft"))
def _agreement(target: LM, head: Any, draft: LM, draft_params: Any, rows: Taught) -> Agreement:
    shown = taught_view(rows.tokens)
    q = draft.forward(draft_params, within(shown, draft.vocab_size).seen)
    return compared(shown, target.logits(head, rows.hidden), q)
