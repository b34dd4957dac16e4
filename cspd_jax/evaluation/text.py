"""A byte n-gram model, the baseline of the language models: interpolated, with Witten-Bell smoothing.

For a context c of the last n - 1 ids, seen N(c) times with T(c) different ids after it,

    p_n(x | c) = (N(c x) + T(c) p_{n-1}(x | c')) / (N(c) + T(c)),

where c' is c without its oldest id and p_0 is uniform; a context never seen leaves p_{n-1} as it is. There is
nothing to fit, and no id has probability zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cspd_jax.data.text import Texts
from cspd_jax.errors import UserError
from cspd_jax.models import TextModel
from cspd_jax.tokenizers import CAUSAL_SIZE, END_OF_TEXT
from cspd_jax.training import presets
from cspd_jax.training.config import TextTrainConfig
from cspd_jax.training.text.objective import bits_per_byte

MOST = 7  # ids that fit into one 64-bit number


class Counts(NamedTuple):
    """Sorted distinct keys (ids as the digits of a number), and what was counted of each."""

    keys: np.ndarray
    counts: np.ndarray

    def of(self, keys: np.ndarray) -> np.ndarray:
        """The counts of some keys; 0 for those never seen."""
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.counts[place], 0)


def ngram_bits_per_byte(train: np.ndarray, held_out: np.ndarray, most: int = 6) -> dict[int, float]:
    """For n = 1, ..., most: bits per byte of the held-out stream. Each of its ids but the first is predicted
    from the n - 1 before it (fewer at the start)."""
    if not 1 <= most <= MOST:
        raise ValueError(f"n-grams of up to {MOST} ids, not {most}")
    train, ids = train.astype(np.int64), held_out.astype(np.int64)
    probability = np.full(len(ids) - 1, 1 / CAUSAL_SIZE)  # of ids[1:]
    found = {}
    for n in range(1, most + 1):
        first = max(0, n - 2)  # those before have fewer than n - 1 ids before them
        probability[first:] = _interpolated(train, ids, n, probability[first:])
        found[n] = float(-np.sum(np.log2(probability)) / np.sum(ids[1:] != END_OF_TEXT))
    return found


def _interpolated(train: np.ndarray, ids: np.ndarray, n: int, shorter: np.ndarray) -> np.ndarray:
    """p_n of the last ids of `ids`, from p_{n-1} of the same."""
    grams = Counts(*np.unique(numbers(train, n), return_counts=True))
    following = Counts(*np.unique(grams.keys // CAUSAL_SIZE, return_counts=True))  # different ids per context
    ends = np.cumsum(following.counts)
    times = Counts(following.keys, np.add.reduceat(grams.counts, ends - following.counts))
    asked = numbers(ids, n)[-len(shorter) :]
    context = asked // CAUSAL_SIZE
    different, total = following.of(context), times.of(context)
    mixed = (grams.of(asked) + different * shorter) / np.maximum(total + different, 1)
    return np.where(total > 0, mixed, shorter)


def numbers(ids: np.ndarray, n: int) -> np.ndarray:
    """Every n neighbouring ids as one number, the newest the last digit: [len(ids) - n + 1]."""
    count = max(0, len(ids) - n + 1)
    found = np.zeros(count, np.int64)
    for i in range(n):
        found = found * CAUSAL_SIZE + ids[i : i + count]
    return found


# How well a language model predicts held-out text, beside n-gram models of the same data.


def evaluate(model: TextModel) -> dict[str, Any]:
    """Bits per byte of the model (of a masked-diffusion model: a bound) and of n-grams, by n; and which texts
    this Python has and which the model was trained on."""
    config = training_config(model)
    texts = Texts(config.data)
    train, held_out = texts.streams["train"], texts.streams["held-out"]
    found = bits_per_byte(model.model, model.params, held_out, config.data.length)
    return {
        "bits_per_byte": round(found, 4),
        "ngrams": {n: round(bits, 4) for n, bits in ngram_bits_per_byte(train, held_out).items()},
        "bytes": len(held_out),
        "corpus": texts.describe(),
        "trained_on": model.metadata["extra"].get("corpus"),
    }


def training_config(model: TextModel) -> TextTrainConfig:
    """The run that made a model; UserError if it was not trained on text here."""
    extra = model.metadata.get("extra")
    told = extra.get("training") if isinstance(extra, dict) else None
    try:
        config = presets.from_json(told) if told else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{model.name} does not describe its training correctly ({error})") from None
    if not isinstance(config, TextTrainConfig):
        raise UserError(
            f"{model.name} does not say which text it was trained on; evaluate is for models made by"
            " cspd-jax train or distill"
        )
    return config
