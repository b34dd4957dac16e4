"""The options for filling places, and the methods that fill them: self-speculation, its
stepwise reference, and the published lossy schedules.

A field is the only place where an option has its name, its default and its meaning. An
option that only one method has is a field of that method."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from cspd_jax._utils.options import documented, option
from cspd_jax.masked.sets import MoveSets

Array = jax.Array
CONFIDENCES = ("clean", "probability", "margin", "entropy", "random", "sequential")


@documented
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Options:
    """How the places after prompts are filled, whatever the method.

    A number may be traced. It is one number for all rows or one for each row [B], and
    changing it compiles nothing. Sizes and flags are static. Whether an option is None
    is static, too.
    """

    max_new_tokens: int = option(
        64,
        "places to fill after each prompt (default: 64)",
        static=True,
        flags=("--new-tokens", "--max-new-tokens"),
        within=(1, None),
        type=int,
        metavar="N",
    )
    block: int | None = option(
        None,
        "places to fill before later ones (default: as the model was made for, or 8);"
        " Dream's schedule ignores it",
        static=True,
        flags=("--block",),
        within=(1, None),
        type=int,
    )
    per_step: int = option(
        1,
        "places that a step fills, at least (default: 1). Places that are filled in one"
        " step do not see each other",
        static=True,
        flags=("--per-step",),
        within=(1, None),
        type=int,
        metavar="N",
    )
    threshold: Array | float | None = option(
        None,
        "a step fills every place whose confidence is above this probability, and"
        " never fewer places than without a threshold",
        flags=("--threshold",),
        within=(0, 1),
        type=float,
        metavar="P",
    )
    confidence: str = option(
        "clean",
        "what makes a place the next one. clean: the probability of its token without"
        " temperature, as in LLaDA (default); probability, margin, entropy: of the"
        " distribution that the token is drawn from, as in Dream (maskgit_plus,"
        " topk_margin, entropy); random: random remasking; sequential: from left to"
        " right",
        static=True,
        flags=("--confidence",),
        choices=CONFIDENCES,
    )
    temperature: Array | float = option(
        0.0,
        "temperature of the tokens; 0 is greedy (default: 0). Dream's and LLaDA's users"
        " take 0.1 to 0.4",
        flags=("--temperature",),
        within=(0, None),
        type=float,
    )
    top_p: Array | float | None = option(
        None,
        "draw from the fewest most probable tokens that together have this probability",
        flags=("--top-p",),
        within=(0, 1),
        type=float,
        metavar="P",
    )
    top_k: Array | int | None = option(
        None,
        "draw from this many tokens at most, the most probable ones of those that the"
        " other limit leaves",
        flags=("--top-k", "--sampling-top-k"),
        within=(1, None),
        type=int,
        metavar="K",
    )
    place_temperature: Array | float | None = option(
        None,
        "draw the place from softmax(confidence / this number), which Dream calls"
        " alg_temp (default: 0, the surest place)",
        flags=("--place-temperature", "--alg-temp"),
        within=(0, None),
        type=float,
        metavar="T",
    )
    guidance: Array | float | None = option(
        None,
        "scale s of classifier-free guidance by the prompt, un + (s + 1) (cond - un)",
        flags=("--guidance",),
        type=float,
        metavar="SCALE",
    )


@documented
@dataclasses.dataclass(frozen=True)
class SelfSpeculation:
    """Drafts several moves per pass, and writes the same text as `Stepwise`. `gamma`
    may be one number for each row [B]."""

    gamma: Array | int = option(
        4,
        "moves drafted and tested per pass (default: 4); more than there are places to"
        " fill is the same as all of them",
        flags=("--gamma",),
        within=(1, None),
        type=int,
        metavar="N",
    )
    max_gamma: int | None = option(
        None,
        "the largest gamma, on which work and memory depend (default: gamma itself)",
    )
    texts: MoveSets | int | None = option(
        None,
        "number of texts read per pass, whose drafts a fitted table chooses; gamma is"
        " then not used. The table is the one that cspd-jax calibrate stored beside the"
        " model, or else the package's; greedy only",
        flags=("--texts",),
        within=(1, None),
        type=int,
        metavar="N",
    )

    name: ClassVar[str] = "ssd"


@dataclasses.dataclass(frozen=True)
class Stepwise:
    """The reference, which takes one step of the rule per pass.

    ahead: whether a pass that stores a finished block also reads the next block. It
        saves the pass that only stores, which SDAR's decoder makes. For other models it
        changes nothing.
    like: a self-speculation whose passes this method uses, without accepting anything
        that they draft. Passes of different shapes round differently in float32; with
        `like`, both methods round alike and write the same texts. It is for models that
        see the whole text.
    """

    like: SelfSpeculation | None = option(
        None, "the way whose passes it reads texts by"
    )
    ahead: bool = option(False, "whether finished blocks are stored without a pass")

    name: ClassVar[str] = "stepwise"


@documented
@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedule that was published with the model's family. It fills several places
    per step and is lossy."""

    steps: int | None = option(
        None,
        "steps of --method schedule (default: half the number of places)",
        flags=("--steps",),
        within=(1, None),
        type=int,
    )

    name: ClassVar[str] = "schedule"


Method = SelfSpeculation | Stepwise | Schedule
