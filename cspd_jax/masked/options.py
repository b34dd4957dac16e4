"""The options of filling places: a field of `Options` is the only place where one has its name, its default,
its meaning and its check. What belongs to one method alone is a field of that method."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from cspd_jax._utils.options import documented, option
from cspd_jax.errors import LARGEST, shown
from cspd_jax.text.checks import given_size, number, require, size, whole_number

Array = jax.Array
CONFIDENCES = ("clean", "probability", "margin", "entropy", "random")
_MAX_TEMPERATURE = 1e6  # above it, little more than the rounding errors of the logits would be left


def _one_of_them(name: str, value: object, batch: int) -> None:
    require(
        isinstance(value, str) and value in CONFIDENCES,
        f"{name} is {shown(value)}; it must be one of {', '.join(CONFIDENCES)}",
    )


@documented
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Options:
    """How the places after prompts are filled, whatever the method.

    Numbers may be traced, and are one number or one for each row [B]; changing them compiles nothing. Sizes
    and flags are static, as is whether an option is None.
    """

    max_new_tokens: int = option(
        64,
        "places to fill after each prompt (default: 64)",
        size,
        static=True,
        flags=("--new-tokens", "--max-new-tokens"),
        type="positive",
        metavar="N",
    )
    block: int = option(
        8,
        "places to fill before later ones (default: 8); Dream's schedule ignores it",
        given_size,
        static=True,
        flags=("--block",),
        type="positive",
    )
    cached: bool = option(
        False,
        "cache keys and values within each block: another sampler, with a stepwise reference of its own",
        static=True,
        flags=("--cache",),
        action="store_true",
    )
    confidence: str = option(
        "clean",
        "what makes a place the next one. clean: the probability of its token without temperature, as in"
        " LLaDA (default); probability, margin, entropy: of the distribution that the token is drawn from, as"
        " in Dream (maskgit_plus, topk_margin, entropy); random: random remasking",
        _one_of_them,
        static=True,
        flags=("--confidence",),
        choices=CONFIDENCES,
    )
    temperature: Array | float = option(
        0.0,
        "of the tokens; 0 is greedy (default: 0). Dream's and LLaDA's users take 0.1 to 0.4",
        number(lambda t: (t >= 0) & (t <= _MAX_TEMPERATURE), f"0 (greedy) to {_MAX_TEMPERATURE:g}"),
        flags=("--temperature",),
        type=float,
    )
    top_p: Array | float | None = option(
        None,
        "draw from the fewest most probable tokens that hold the probability P",
        number(lambda p: (p > 0) & (p <= 1), "above 0 and at most 1 (None is off)"),
        flags=("--top-p",),
        type=float,
        metavar="P",
    )
    top_k: Array | int | None = option(
        None,
        "draw from the K most probable tokens, after --top-p",
        whole_number(lambda k: k >= 1, "at least 1 (None is off)"),
        flags=("--sampling-top-k",),
        type="positive",
        metavar="K",
    )
    place_temperature: Array | float | None = option(
        None,
        "draw the place from softmax(confidence / T), Dream's alg_temp (default: 0, the surest place)",
        number(
            lambda t: (t >= 0) & (t <= _MAX_TEMPERATURE),
            f"above 0 and at most {_MAX_TEMPERATURE:g} (0 and None are off)",
        ),
        flags=("--place-temperature", "--alg-temp"),
        type=float,
        metavar="T",
    )
    guidance: Array | float | None = option(
        None,
        "scale s of classifier-free guidance by the prompt, un + (s + 1) (cond - un)",
        number(lambda s: np.abs(s) <= LARGEST, "a finite number (None is off)"),
        flags=("--guidance",),
        type=float,
        metavar="SCALE",
    )
