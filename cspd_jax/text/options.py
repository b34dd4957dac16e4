"""The options of text generation. The fields of `Options` are the only place that holds
an option's name, default and meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from cspd_jax._utils.options import documented, option

Array = jax.Array


@documented
@dataclasses.dataclass(frozen=True)
class Options:
    """How prompts are continued, by any method.

    Numbers may be traced, and changing a number does not recompile. Each is one number
    for all rows, or one number per row [B], unless its own line says otherwise. max_len
    and exact_bits are static, and so is whether an option is None.
    """

    max_new_tokens: Array | int = option(
        128,
        "tokens to generate per prompt (default: 128)",
        flags=("--new-tokens", "--max-new-tokens"),
        within=(0, None),  # a row that gets none may stand beside others
        type="count",
        metavar="N",
    )
    max_len: int | None = option(
        None, "most tokens of a prompt and its continuation (default: enough for all)"
    )
    stop_ids: Array | Sequence[int] | None = option(
        None,
        "rows end with one of these ids, which is kept (default: the model's eos_ids)",
    )
    temperature: Array | float | None = option(
        0.0,
        "scale of the logits; 0 always takes the most probable token (default: 0)",
        flags=("--temperature",),
        within=(0, None),
        type=float,
    )
    top_k: Array | int | None = option(
        None,
        "sample from this many tokens, the most probable ones",
        flags=("--top-k",),
        within=(1, None),
        type=int,
        metavar="K",
    )
    top_p: Array | float | None = option(
        None,
        "sample from the most probable tokens that together have this probability",
        flags=("--top-p",),
        within=(0, 1),
        type=float,
        metavar="P",
    )
    exact_bits: int | None = option(
        None,
        "every pass over new tokens has the shape of this many drafts, and unused"
        " places are padded, also in plain decoding. Then a text with drafts equals"
        " the plain text in float32, too. For greedy texts and for the rule match",
    )
