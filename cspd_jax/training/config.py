"""The settings of a training run, as frozen dataclasses, and changing them by name."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from cspd_jax._utils.typed import check_kinds
from cspd_jax.diffusion.schedule import sampling_schedule
from cspd_jax.errors import UserError, shown
from cspd_jax.networks.config import MARConfig, SphereConfig
from cspd_jax.networks.eagle_config import EagleConfig
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.training.data.digits import DigitsConfig
from cspd_jax.training.data.folder import FolderConfig
from cspd_jax.training.data.glyphs import GlyphConfig
from cspd_jax.training.data.text import TextConfig
from cspd_jax.training.data.words import WordsConfig

DataConfig = GlyphConfig | WordsConfig | DigitsConfig | FolderConfig
_PARTS = ("model", "data")
_COUNTS = ("steps", "batch", "accumulate", "log_every", "checkpoint_every")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings that every training run has.

    model: the configuration of the network.
    data: the configuration of the data set.
    steps: optimiser steps.
    batch: images, or rows of text, per step.
    accumulate: parts of a batch whose gradients are added before a step; more take less memory.
    seed: of everything random.
    learning_rate: of AdamW, after warm-up.
    warmup: steps of linear warm-up.
    decay: the learning rate falls along a cosine over this many last steps; 0 keeps it constant.
    final_rate: what it falls to, as a fraction of `learning_rate`.
    weight_decay: acts on matrices and embeddings only, and not on a head.
    clip: largest global norm of a gradient.
    ema: decay of the averaged weights, or (1 + step) / (10 + step) while that is smaller.
    dtype: of the activations, float32 or bfloat16.
    log_every: steps per line of the log.
    checkpoint_every: steps between checkpoints.
    sample_every: steps between samples or measurements; 0 makes none.
    """

    model: MARConfig | SphereConfig | LMConfig | EagleConfig
    data: DataConfig | TextConfig
    steps: int = 10_000
    batch: int = 32
    accumulate: int = 1
    seed: int = 0
    learning_rate: float = 1e-3
    warmup: int = 500
    decay: int = 0
    final_rate: float = 0.02
    weight_decay: float = 0.02
    clip: float = 3.0
    ema: float = 0.999
    dtype: str = "float32"
    log_every: int = 50
    checkpoint_every: int = 500
    sample_every: int = 1000

    def __post_init__(self):
        check_kinds(self)
        for part, kinds in typing.get_type_hints(type(self)).items():
            if part in _PARTS and not isinstance(given := getattr(self, part), kinds):
                raise UserError(f"{part} is {shown(given)}; it must be {_named(kinds)}")
        self._require("at least 1", lambda x: x >= 1, *_COUNTS)
        self._require("0 or more", not_negative, "seed", "warmup", "decay", "sample_every", "weight_decay")
        self._require(f"below {2**32}", lambda x: x < 2**32, "seed")
        self._require(f"below {2**32}", lambda x: x < 2**32, "steps", "warmup", "decay")
        self._require(f"below {2**20}", lambda x: x < 2**20, "batch")
        self._require("above 0", positive, "learning_rate", "clip")
        self._require("from 0 to below 1", share, "ema", "final_rate")
        if self.batch % self.accumulate:
            raise UserError(f"a batch of {self.batch} cannot be cut into {self.accumulate} equal parts")
        if self.warmup + self.decay > self.steps:
            raise UserError(f"warmup {self.warmup} and decay {self.decay} do not fit into {self.steps} steps")
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"dtype {self.dtype!r} is unknown; it is float32 or bfloat16")

    def _require(self, what: str, holds: Callable[[float], bool], *names: str) -> None:
        for name in names:
            if not holds(getattr(self, name)):
                raise UserError(f"{name} is {getattr(self, name)}; it must be {what}")


def _named(kinds: Any) -> str:
    """ "a MARConfig", or "a GlyphConfig or a WordsConfig"."""
    several = typing.get_args(kinds) if isinstance(kinds, types.UnionType) else (kinds,)
    return " or ".join(f"a {kind.__name__}" for kind in several)


def not_negative(x: float) -> bool:
    return 0 <= x < math.inf


def positive(x: float) -> bool:
    return 0 < x < math.inf


def share(x: float) -> bool:
    return 0 <= x < 1


@dataclasses.dataclass(frozen=True)
class TrainConfig(RunConfig):
    """One training run of an image model: with the code, everything its result depends on.

    copies: MAR's diffusion batch multiplier, the noise levels per token and step.
    label_drop: fraction of rows trained without their label.
    least_mask_ratio: the mask ratio is a normal with mean 1, truncated to [least_mask_ratio, 1].
    mask_ratio_deviation: the standard deviation of that normal.
    focus: share of the noise levels that are drawn where it is decided which of several things a token shows.
    max_weight: at high noise the squared error of eps hardly depends on the token, so it counts as much as
        that of the velocity would, 1 / alpha_bar times, up to this; 1 is MAR's objective.
    hint: weight of a second loss, on what the backbone knows: the cross-entropy of the letter that a token
        shows, read from z by a fixed random matrix. For pictures of words, which come with their letters.
    settle: so many first steps show five eighths of the tokens each, from which a small model learns soonest
        how tokens depend on one another.
    on_grid: positions begin as a row's vector plus a column's and the encoder's blocks as the identity, in
        place of MAR's random values, from which small models hardly learn which tokens belong together.
    buckets: number of ranges of the number of known tokens; the step is compiled once for each.
    sample_cfg: guidance scale of the sample pictures.
    """

    model: MARConfig
    data: DataConfig
    copies: int = 4
    label_drop: float = 0.1
    least_mask_ratio: float = 0.7
    mask_ratio_deviation: float = 0.25
    focus: float = 0.0
    max_weight: float = 1.0
    hint: float = 0.0
    settle: int = 0
    on_grid: bool = False
    buckets: int = 4
    sample_cfg: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        self._require("from 1 to 1024", lambda x: 1 <= x <= 1024, "copies", "buckets")
        self._require("0 or more", not_negative, "sample_cfg", "settle", "hint")
        self._require("from 1 to 1000", lambda x: 1 <= x <= 1000, "max_weight")
        self._require("above 0", positive, "mask_ratio_deviation")
        self._require("from 0 to below 1", share, "label_drop", "focus")
        self._require("between 0 and 1", lambda x: 0 < x < 1, "least_mask_ratio")
        if self.hint and not isinstance(self.data, WordsConfig):
            raise UserError("hint is for pictures of words, of which each token's letter is known")
        if self.settle and self.least_mask_ratio > 3 / 8:
            raise UserError(
                f"settle shows five eighths of the tokens; least_mask_ratio is {self.least_mask_ratio}, which"
                " hides more; it must be at most 0.375 then"
            )
        sampling_schedule(self.model.respacing)  # or the trained model could not be sampled


@dataclasses.dataclass(frozen=True)
class FlowTrainConfig(RunConfig):
    """One training run of a causal image model with a flow head.

    copies: times and noises per token and step.
    label_drop: fraction of rows trained without their label.
    sample_cfg: guidance scale of the sample pictures.
    """

    model: SphereConfig
    data: DataConfig
    copies: int = 4
    label_drop: float = 0.1
    sample_cfg: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        self._require("from 1 to 1024", lambda x: 1 <= x <= 1024, "copies")
        self._require("0 or more", not_negative, "sample_cfg")
        self._require("from 0 to below 1", share, "label_drop")
        sampling_schedule(self.model.respacing)  # or the trained model could not be sampled


ImageTrainConfig = TrainConfig | FlowTrainConfig


@dataclasses.dataclass(frozen=True)
class TextTrainConfig(RunConfig):
    """One training run of a language model; `model.causal` decides the objective.

    data_share: when distilling, the weight of the data's own objective in the loss.
    """

    model: LMConfig
    data: TextConfig
    data_share: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        self._require("from 0 to below 1", share, "data_share")
        if not (self.model.causal or self.model.mask_ids):
            raise UserError("a model that is not causal needs the id that hides a token, in model.mask_ids")
        if self.data.length > self.model.max_positions:
            raise UserError(
                f"data.length is {self.data.length}, but the model has {self.model.max_positions} positions"
            )


@dataclasses.dataclass(frozen=True)
class HeadTrainConfig(RunConfig):
    """One training run of a head that drafts from its target's states. What it has of the target, it takes
    from there: `model` says how many ids it has of its own, and which layers' states it reads.

    fed_back: how often its own states are fed back in a step of training, each time one token further.
    decline: what each of these turns counts beside the one before.
    products: what the operands of matrix products are rounded to, float32 or bfloat16, whose sums are
        float32; bfloat16 takes about half the time on a CPU with AMX.
    """

    model: EagleConfig
    data: TextConfig
    fed_back: int = 2
    decline: float = 0.8
    products: str = "float32"

    def __post_init__(self):
        super().__post_init__()
        self._require("from 0 to 16", lambda x: 0 <= x <= 16, "fed_back")
        self._require("above 0", positive, "decline")
        if self.products not in ("float32", "bfloat16"):
            raise UserError(f"products {self.products!r} is unknown; it is float32 or bfloat16")


def with_settings(config: RunConfig, settings: Iterable[str]) -> RunConfig:
    """The configuration with changed fields, given as texts.

    For example `steps=2000`, `model.encoder_width=64` or `data.fonts=cmr10,cmss10`.
    """
    if not isinstance(config, RunConfig):
        raise UserError(f"config is {shown(config)}; it must be the settings of a run, such as a preset's")
    if isinstance(settings, str) or not isinstance(settings, Iterable):
        raise UserError(f"settings are {shown(settings)}; they must be a list such as ['steps=2000']")
    changes: dict[str, dict[str, Any]] = {"": {}, **{part: {} for part in _PARTS}}
    for setting in settings:
        if not isinstance(setting, str):
            raise UserError(f"a setting is {shown(setting)}; it must be a string such as 'steps=2000'")
        name, equals, text = setting.partition("=")
        if not equals:
            raise UserError(f"{setting!r} is not understood; write NAME=VALUE, for example steps=2000")
        part, _, field = name.strip().rpartition(".")
        owner = config if part == "" else getattr(config, part, None) if part in _PARTS else None
        if owner is None or field in _PARTS or field not in field_names(owner):
            raise UserError(f"there is no setting {name!r}; there are {', '.join(every_name(config))}")
        changes[part][field] = parse(text.strip(), getattr(owner, field), name)
    parts = {part: dataclasses.replace(getattr(config, part), **changes[part]) for part in _PARTS}
    return dataclasses.replace(config, **parts, **changes[""])


def field_names(owner: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(owner)]


def every_name(config: RunConfig) -> list[str]:
    """All names that `with_settings` knows for this configuration."""
    own = [name for name in field_names(config) if name not in _PARTS]
    return own + [f"{part}.{name}" for part in _PARTS for name in field_names(getattr(config, part))]


def parse(text: str, current: Any, name: str) -> Any:
    """`text` as a value of the type that the field has."""
    if isinstance(current, bool):
        if text.lower() not in ("true", "false"):
            raise UserError(f"{name} is true or false, not {text!r}")
        return text.lower() == "true"
    if isinstance(current, tuple):
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        whole = name.endswith("_ids") or any(isinstance(entry, int) for entry in current)
        return tuple(parse(part, 0, name) for part in parts) if whole else parts
    if isinstance(current, (int, float)):
        kind = type(current)
        try:
            if not text.isascii() or "_" in text:
                raise ValueError
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise UserError(f"{name} is {wanted}, not {text!r}") from None
    return text
