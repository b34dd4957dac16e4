"""The settings of a training run, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from cspd_jax.data.digits import DigitsConfig
from cspd_jax.data.folder import FolderConfig
from cspd_jax.data.glyphs import GlyphConfig
from cspd_jax.data.text import TextConfig
from cspd_jax.errors import UserError
from cspd_jax.networks.config import MARConfig
from cspd_jax.networks.lm_config import LMConfig

DataConfig = GlyphConfig | DigitsConfig | FolderConfig


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What every training run has.

    Optimiser: AdamW with `learning_rate` reached after `warmup` steps and kept, except that it falls to
    `final_rate` of itself along a cosine over the last `decay` steps (0: constant). `weight_decay` acts on
    matrices and embeddings only, and not on a head. Gradients are clipped to global norm `clip`.
    ema: decay of the averaged weights; while young, (1 + step) / (10 + step) if that is less.
    Reporting: losses every `log_every` steps; a checkpoint, and samples or a measurement, every so often
    (`sample_every` 0: none).
    """

    model: Any
    data: Any
    steps: int = 10_000
    batch: int = 32
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
        self._require("at least 1", lambda x: x >= 1, "steps", "batch", "log_every", "checkpoint_every")
        self._require("0 or more", not_negative, "seed", "warmup", "decay", "sample_every", "weight_decay")
        self._require(f"below {2**32}", lambda x: x < 2**32, "seed")
        self._require("above 0", positive, "learning_rate", "clip")
        self._require("from 0 to below 1", share, "ema", "final_rate")
        if self.warmup + self.decay > self.steps:
            raise UserError(f"warmup {self.warmup} and decay {self.decay} do not fit into {self.steps} steps")
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"dtype {self.dtype!r} is unknown; it is float32 or bfloat16")

    def _require(self, what: str, holds: Callable[[float], bool], *names: str) -> None:
        for name in names:
            if not holds(getattr(self, name)):
                raise UserError(f"{name} is {getattr(self, name)}; it must be {what}")


def not_negative(x: float) -> bool:
    return 0 <= x < math.inf


def positive(x: float) -> bool:
    return 0 < x < math.inf


def share(x: float) -> bool:
    return 0 <= x < 1


@dataclasses.dataclass(frozen=True)
class TrainConfig(RunConfig):
    """One training run of an image model: together with the code, all that its result depends on.

    Objective: `copies` is MAR's diffusion batch multiplier, `label_drop` the share of rows trained
    without their label. The mask ratio is a normal around 1 of `mask_ratio_deviation`, cut off below
    `least_mask_ratio` (and above 1).
    buckets: the step is compiled for this many ranges of the number of known tokens.
    sample_cfg: guidance of the pictures.
    """

    model: MARConfig
    data: DataConfig
    copies: int = 4
    label_drop: float = 0.1
    least_mask_ratio: float = 0.7
    mask_ratio_deviation: float = 0.25
    buckets: int = 4
    sample_cfg: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        self._require("at least 1", lambda x: x >= 1, "copies", "buckets")
        self._require("0 or more", not_negative, "sample_cfg")
        self._require("above 0", positive, "mask_ratio_deviation")
        self._require("from 0 to below 1", share, "label_drop")
        self._require("between 0 and 1", lambda x: 0 < x < 1, "least_mask_ratio")


@dataclasses.dataclass(frozen=True)
class TextTrainConfig(RunConfig):
    """One training run of a language model; what it learns follows from `model.causal`.

    data_share: when distilling, the share of the data's own objective in the loss.
    """

    model: LMConfig
    data: TextConfig
    data_share: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        self._require("from 0 to below 1", share, "data_share")
        if self.data.length > self.model.max_positions:
            raise UserError(
                f"data.length is {self.data.length}, but the model has {self.model.max_positions} positions"
            )


# Changing single fields of a configuration by name, from text.

_PARTS = ("model", "data")


def with_settings(config: RunConfig, settings: Iterable[str]) -> RunConfig:
    """`settings` are texts like `steps=2000`, `model.encoder_width=64` or `data.fonts=cmr10,cmss10`."""
    changes: dict[str, dict[str, Any]] = {"": {}, **{part: {} for part in _PARTS}}
    for setting in settings:
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
    """`text` as a value of the type that the field has now."""
    if isinstance(current, bool):
        if text.lower() not in ("true", "false"):
            raise UserError(f"{name} is true or false, not {text!r}")
        return text.lower() == "true"
    if isinstance(current, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if isinstance(current, (int, float)):
        kind = type(current)
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise UserError(f"{name} is {wanted}, not {text!r}") from None
    return text
