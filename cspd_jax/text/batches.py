"""Long lists of prompts, some at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cspd_jax.errors import check_whole
from cspd_jax.text.checks import keys_of_rows
from cspd_jax.text.drafters import DrafterLike
from cspd_jax.text.generation import generate
from cspd_jax.text.info import TextOutput, add
from cspd_jax.text.options import Options
from cspd_jax.text.prompts import Prompts, pad_prompts
from cspd_jax.text.protocol import Model

Array = jax.Array
_STEP = 32  # tokens; prompts are padded to a multiple of it, so that few programs are compiled


def generate_batches(
    key: Array | None,
    model: Model,
    prompts: Sequence[Sequence[int]],
    drafter: DrafterLike = None,
    options: Options = Options(),
    *,
    rows: int,
) -> TextOutput:
    """Continues `rows` prompts at a time, and returns what `generate` returns for all of them.

    Prompts of similar lengths share a batch, so that little is padded; texts come back in the order of the
    prompts, in numpy, and each has the key that it has in one batch. The last batch is filled up. The other
    arguments are those of `generate`.
    """
    check_whole("rows", rows, 1)
    tokens, lengths = pad_prompts(prompts)
    keys = None if key is None else keys_of_rows(key, len(lengths))
    order = np.argsort(lengths, kind="stable")
    outputs = []
    for first in range(0, len(order), rows):
        filled = np.minimum(first + np.arange(rows), len(order) - 1)
        some = order[filled]
        width = -(-int(lengths[some].max()) // _STEP) * _STEP
        padded = np.pad(tokens[some, :width], ((0, 0), (0, max(0, width - tokens.shape[1]))))
        made = generate(
            None if keys is None else keys[some],
            model,
            Prompts(padded, lengths[some]),
            drafter,
            _options_of(options, some),
        )
        outputs.append(jax.device_get(made))
    return _in_order(outputs, order)


def _options_of(options: Options, some: np.ndarray) -> Options:
    """Returns the options of some rows: numbers that each row has for itself are taken apart."""
    named = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name != "stop_ids"}
    own: dict[str, Any] = {name: np.asarray(value)[some] for name, value in named.items() if np.ndim(value)}
    return dataclasses.replace(options, **own)


def _in_order(outputs: Sequence[TextOutput], order: np.ndarray) -> TextOutput:
    """Joins the rows of all batches, in the order of their prompts, and adds up the network calls."""

    def joined(*parts: np.ndarray) -> np.ndarray:
        width = max(part.shape[1:] for part in parts)
        room = lambda part: [(0, 0), *((0, w - n) for w, n in zip(width, part.shape[1:]))]
        wide = np.concatenate([np.pad(part, room(part)) for part in parts])
        return wide[: len(order)][np.argsort(order)]

    none: Any = None
    rows = [output._replace(info=output.info._replace(calls=none)) for output in outputs]
    calls = outputs[0].info.calls
    for output in outputs[1:]:
        calls = add(calls, output.info.calls)
    made = jax.tree.map(joined, *rows)
    return made._replace(info=made.info._replace(calls=calls))
