"""The options of a continuation: a field of `Options` alone has the name, the default
and the meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from cspd_jax._utils.options import documented, option

Array = jax.Array


@documented
@dataclasses.dataclass(frozen=True)
class Options:
    """How prompts are continued.

    Numbers may be traced, and unless it says otherwise they are one number or one for
    each row [B]; changing them compiles nothing. The rule and the bounds (max_len,
    max_gamma) are static, as is whether an option is None. Neither draft_cost nor
    confidence changes the distribution of the output, and no rule does.
    """

    max_new_tokens: Array | int = option(
        128,
        "tokens to generate per prompt (default: 128)",
        flags=("--new-tokens", "--max-new-tokens"),
        type=int,
        metavar="N",
    )
    rule: str | None = option(
        None,
        "block (the default) and google sample from the same distribution as plain"
        " decoding, as"
        " does tree, the rule of draft trees; match gives its very tokens. When greedy"
        " they are all the same",
    )
    gamma: Array | int = option(
        4,
        "drafts per round (default: 4; with --method auto 2 or 4)",
        flags=("--gamma",),
        type=int,
        default=None,
    )
    max_gamma: int | None = option(
        None,
        "the largest gamma, on which work and memory depend (default: gamma itself)",
    )
    max_len: int | None = option(
        None, "room for prompt and new tokens, where rows end (default: enough for all)"
    )
    stop_ids: Array | Sequence[int] | None = option(
        None,
        "rows end with one of these ids, which is kept (default: the model's eos_ids)",
    )
    draft_cost: Array | float | None = option(
        None,
        "time of a draft as a share of a target pass; with it each row drafts as many"
        " of its gamma as pay off"
        " at its own acceptance so far",
    )
    confidence: Array | float | None = option(
        None,
        "draft nothing more where the drafter gives no token a probability of P"
        " (default: 0.2 for heads,"
        " 0 for others)",
        flags=("--confidence",),
        type=float,
        metavar="P",
    )
    temperature: Array | float | None = option(
        0.0,
        "0 is greedy (default: 0)",
        flags=("--temperature",),
        type=float,
    )
    top_k: Array | int | None = option(
        None,
        "sample from the K most probable tokens",
        flags=("--top-k",),
        type=int,
        metavar="K",
    )
    top_p: Array | float | None = option(
        None,
        "sample from the most probable tokens that together have probability P",
        flags=("--top-p",),
        type=float,
        metavar="P",
    )
    exact_bits: bool = option(
        False,
        "every pass over new tokens has the shape of gamma drafts, also in plain"
        " decoding, whose other places"
        " are padded: so a text with drafts is the plain one of the same gamma in"
        " float32, too. Greedy, or by"
        " the rule match",
        static=True,
        flags=("--exact-bits",),
        action="store_true",
    )
