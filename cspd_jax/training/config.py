"""The settings of a training run, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
import math

from cspd_jax.data.digits import DigitsConfig
from cspd_jax.data.folder import FolderConfig
from cspd_jax.data.glyphs import GlyphConfig
from cspd_jax.errors import UserError
from cspd_jax.networks.config import MARConfig

DataConfig = GlyphConfig | DigitsConfig | FolderConfig


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run: together with the code, all that its result depends on.

    Optimiser: AdamW with `learning_rate` reached after `warmup` steps and kept, except that it falls to
    `final_rate` of itself along a cosine over the last `decay` steps (0: constant). `weight_decay` acts on
    the backbone's matrices and embeddings only. Gradients are clipped to global norm `clip`.
    ema: decay of the averaged weights; while young, (1 + step) / (10 + step) if that is less.
    Objective: `copies` is MAR's diffusion batch multiplier, `label_drop` the share of rows trained
    without their label. The mask ratio is a normal around 1 of `mask_ratio_deviation`, cut off below
    `least_mask_ratio` (and above 1).
    buckets: the step is compiled for this many ranges of the number of known tokens.
    Reporting: losses every `log_every` steps; a checkpoint and pictures every so often (0: no pictures).
    """

    model: MARConfig
    data: DataConfig
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
    copies: int = 4
    label_drop: float = 0.1
    least_mask_ratio: float = 0.7
    mask_ratio_deviation: float = 0.25
    buckets: int = 4
    dtype: str = "float32"
    log_every: int = 50
    checkpoint_every: int = 500
    sample_every: int = 1000
    sample_cfg: float = 1.0

    def __post_init__(self):
        for name in ("steps", "batch", "copies", "buckets", "log_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("seed", "warmup", "decay", "sample_every", "weight_decay", "sample_cfg"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.seed >= 2**32:
            raise UserError(f"seed is {self.seed}; it must be below {2**32}")
        for name in ("learning_rate", "clip", "mask_ratio_deviation"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("ema", "label_drop", "final_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be from 0 to below 1")
        if not 0 < self.least_mask_ratio < 1:
            raise UserError(f"least_mask_ratio is {self.least_mask_ratio}; it must lie between 0 and 1")
        if self.warmup + self.decay > self.steps:
            raise UserError(f"warmup {self.warmup} and decay {self.decay} do not fit into {self.steps} steps")
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"dtype {self.dtype!r} is unknown; it is float32 or bfloat16")
