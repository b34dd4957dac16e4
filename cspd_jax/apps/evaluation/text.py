"""How well a language model predicts held-out text, compared with n-gram models of the same data.

The baseline is an interpolated byte n-gram model with Witten-Bell smoothing. For a context c of the last n -
1 ids, seen N(c) times and followed by T(c) distinct ids,

    p_n(x | c) = (N(c x) + T(c) p_{n-1}(x | c')) / (N(c) + T(c)),

where c' is c without its oldest id and p_0 is uniform; an unseen context leaves p_{n-1} as it is. There is
nothing to fit, and no id has probability zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cspd_jax.errors import UserError
from cspd_jax.training import settings_file
from cspd_jax.training.config import TextTrainConfig
from cspd_jax.training.data.text import Texts
from cspd_jax.training.text.objective import bits_per_byte
from cspd_jax.weights.models import TextModel
from cspd_jax.weights.tokenizers import CAUSAL_SIZE, END_OF_TEXT

MOST = 7  # ids that fit into one 64-bit number


def evaluate(model: TextModel) -> dict[str, Any]:
    """Bits per byte of the model (a bound for masked diffusion) and of n-grams, and which corpus was used.

    `corpus` describes the text of this Python, `trained_on` that of the model's training.
    """
    config = training_config(model)
    texts = Texts(config.data)
    train, held_out = texts.streams["train"], texts.streams["held-out"]
    found = bits_per_byte(model.network, model.params, held_out, config.data.length)
    return {
        "bits_per_byte": round(found, 4),
        "ngrams": {n: round(bits, 4) for n, bits in ngram_bits_per_byte(train, held_out).items()},
        "bytes": len(held_out),
        "corpus": texts.describe(),
        "trained_on": model.metadata["extra"].get("corpus"),
    }


def training_config(model: TextModel) -> TextTrainConfig:
    """The settings of the run that made a model; UserError if its checkpoint does not have them."""
    extra = model.metadata.get("extra")
    told = extra.get("training") if isinstance(extra, dict) else None
    try:
        config = settings_file.from_json(told) if told else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{model.name} does not describe its training correctly ({error})") from None
    if not isinstance(config, TextTrainConfig):
        raise UserError(
            f"{model.name} does not say which text it was trained on; evaluate is for models made by"
            " cspd-jax train or distill"
        )
    return config


class GramCounts(NamedTuple):
    """A count for each n-gram.

    keys: [K] int64, sorted and distinct; the ids are the digits of a number.
    counts: [K] int64.
    """

    keys: np.ndarray
    counts: np.ndarray

    def of(self, keys: np.ndarray) -> np.ndarray:
        """The counts of `keys`; 0 for unseen ones."""
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.counts[place], 0)


def ngram_bits_per_byte(train: np.ndarray, held_out: np.ndarray, most: int = 6) -> dict[int, float]:
    """Bits per byte of the held-out stream for n = 1, ..., most.

    Each id but the first is predicted from the n - 1 ids before it (fewer at the start).
    """
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
    grams = GramCounts(*np.unique(numbers(train, n), return_counts=True))
    following = GramCounts(
        *np.unique(grams.keys // CAUSAL_SIZE, return_counts=True)
    )  # distinct ids per context
    ends = np.cumsum(following.counts)
    times = GramCounts(following.keys, np.add.reduceat(grams.counts, ends - following.counts))
    asked = numbers(ids, n)[-len(shorter) :]
    context = asked // CAUSAL_SIZE
    different, total = following.of(context), times.of(context)
    mixed = (grams.of(asked) + different * shorter) / np.maximum(total + different, 1)
    return np.where(total > 0, mixed, shorter)


def numbers(ids: np.ndarray, n: int) -> np.ndarray:
    """Each n consecutive ids as one number, the newest as the last digit: [len(ids) - n + 1]."""
    count = max(0, len(ids) - n + 1)
    found = np.zeros(count, np.int64)
    for i in range(n):
        found = found * CAUSAL_SIZE + ids[i : i + count]
    return found
