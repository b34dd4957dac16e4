"""Prompts as lists of ids or as padded arrays, for causal and masked-diffusion models."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cspd_jax._utils import limits
from cspd_jax._utils.arrays import as_array
from cspd_jax.errors import UserError, shown
from cspd_jax.text.checks import concrete, holds, require
from cspd_jax.text.protocol import LanguageModelConfig

Array = jax.Array
BEYOND = 16  # times its positions a model runs without a word in Python; what comes out is another matter
_WANTED = "prompts must be a list of lists of ids, or a tuple (tokens [B, P], lengths [B])"


class Prompts(NamedTuple):
    """Prompts of different lengths as arrays, which may be traced under jit.

    tokens: [B, P] ids, each prompt at the left edge; what follows it in its row is ignored.
    lengths: [B] number of tokens in each prompt.
    """

    tokens: Any
    lengths: Any


PromptsLike = Prompts | tuple[Array, Array] | Sequence[Sequence[int]]


def pad_prompts(prompts: Sequence[Sequence[int] | np.ndarray]) -> Prompts:
    """Makes arrays of lists of ids, padded with zeros on the right."""
    dims: Any = getattr(prompts, "ndim", 1)  # JAX's arrays of none are iterable by name
    require(isinstance(prompts, Iterable) and not isinstance(prompts, (str, bytes, dict)), _WANTED)
    require(dims, _WANTED)
    rows = [_ids(prompt) for prompt in itertools.islice(prompts, limits.PROMPTS + 1)]
    require(len(rows) <= limits.PROMPTS, f"there are over {limits.PROMPTS} prompts; give some at a time")
    lengths = np.array([len(row) for row in rows], np.int32)
    most = len(rows) * int(max(lengths, default=0))
    require(
        most <= limits.PROMPT_IDS, f"the prompts, padded to the longest, are {most} ids; give some at a time"
    )
    tokens = np.zeros((len(rows), max(lengths, default=0)), np.int32)
    for row, ids in zip(tokens, rows):
        row[: len(ids)] = ids
    return Prompts(tokens, lengths)


def as_prompts(prompts: PromptsLike) -> Prompts:
    """A list of prompts is padded; a tuple is taken to be (tokens, lengths) already."""
    if isinstance(prompts, tuple):
        require(len(prompts) == 2, _WANTED)
        try:
            return Prompts(*(part if isinstance(part, Array) else as_array(part) for part in prompts))
        except (ValueError, OverflowError):
            raise UserError(_WANTED) from None
    return pad_prompts(prompts)


def _ids(prompt: Any) -> np.ndarray:
    """A prompt [P] of a list; whether its ids are the model's is seen later."""
    try:
        ids = as_array(prompt)
    except jax.errors.TracerArrayConversionError:
        raise UserError("an id in a prompt is traced; give (tokens, lengths) as arrays inside jit") from None
    except (ValueError, OverflowError):
        raise UserError(_WANTED) from None
    require(ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iuO"), _WANTED)
    for i in ids.tolist():
        require(
            type(i) is int and 0 <= i < 2**31,
            f"{shown(i)} in a prompt is no id; ids are whole, from 0 to 2^31 - 1",
        )
    return ids.astype(np.int32)


def check_length(config: LanguageModelConfig, longest: int, new: int, beyond: int = 1) -> None:
    """UserError if prompts of up to `longest` tokens and `new` ones are more than `beyond` times what the
    model was made for."""
    most = getattr(config, "max_positions", longest + new)
    if longest + new > beyond * most:
        times, flag = (f"{beyond} times ", "") if beyond > 1 else ("", " (--new-tokens)")
        raise UserError(
            f"a prompt of {longest} tokens and {new} new ones are more than {times}the {most} positions that"
            f" the model was made for; shorten the prompt, or ask for fewer new tokens{flag}"
        )


def check_prompts(config: LanguageModelConfig, prompts: Prompts, shortest: int = 1) -> tuple[int, int]:
    """Returns (B, P) of the prompts; raises a UserError unless they fit each other and the vocabulary."""
    require(np.ndim(prompts.tokens) == 2, _WANTED)
    batch, longest = np.shape(prompts.tokens)
    for what, numbers in zip(Prompts._fields, prompts):
        kind = numbers.dtype.kind if hasattr(numbers, "dtype") else np.asarray(numbers).dtype.kind
        require(kind in "iu", f"the {what} of the prompts are no whole numbers; {_WANTED}")
    require(batch, "there is no prompt; give at least one")
    require(
        np.shape(prompts.lengths) == (batch,),
        f"there must be one length for each of {batch} prompts, not lengths of shape"
        f" {np.shape(prompts.lengths)}",
    )
    require(
        holds(prompts.lengths, lambda n: n >= shortest),
        f"a prompt is empty; it needs at least {shortest} token to begin with"
        if shortest
        else "the length of a prompt is negative",
    )
    require(
        holds(prompts.lengths, lambda n: n <= longest),
        f"a prompt is longer than the {longest} tokens given",
    )
    tokens, lengths = concrete(prompts.tokens), concrete(prompts.lengths)
    if tokens is not None and lengths is not None:
        ids = tokens[np.arange(longest) < lengths[:, None]]
        unknown = ids[(ids < 0) | (ids >= config.known_ids)]
        for wrong in unknown:
            raise UserError(f"id {wrong} in a prompt is not one of the model's {config.known_ids} ids")
        for mask in np.intersect1d(ids, getattr(config, "mask_ids", ())):
            raise UserError(f"id {mask} in a prompt is the mask's; places to be filled come after the prompt")
    return batch, longest
