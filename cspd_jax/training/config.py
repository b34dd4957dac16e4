"""The settings of a training run, as frozen dataclasses. Settings can be changed by
name and are written as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from cspd_jax.check import UserError
from cspd_jax.networks.eagle import EagleConfig
from cspd_jax.networks.mar import MARConfig
from cspd_jax.training.data.folder import Folder
from cspd_jax.training.data.glyphs import Glyphs
from cspd_jax.training.data.text import Texts
from cspd_jax.training.data.words import Words

DATA = {"glyphs": Glyphs, "words": Words, "folder": Folder, "text": Texts}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings that every training run has. Runs of causal image models and of
    language models have no other settings; `model` decides what they learn.

    model: the configuration of the network.
    data: the data set.
    steps: the number of steps. Each step takes one batch.
    batch: the number of images, or of rows of text, per step.
    accumulate: the number of batches whose mean gradient makes one step of the
        optimiser.
    seed: the seed of all random numbers.
    learning_rate: the learning rate of AdamW after warm-up.
    warmup: the number of steps of linear warm-up.
    decay: the number of last steps over which the learning rate falls along a cosine; 0
        keeps the rate constant.
    weight_decay: the weight decay of matrices and embeddings; it does not act on a
        head.
    clip: the largest global norm of a gradient.
    ema: the decay of the averaged weights. While (1 + step) / (10 + step) is smaller,
        that is the decay.
    dtype: the type of the activations, float32 or bfloat16.
    log_every: the number of steps per line of the log.
    checkpoint_every: the number of steps between checkpoints.
    """

    model: Any
    data: Any
    steps: int = 10_000
    batch: int = 32
    accumulate: int = 1
    seed: int = 0
    learning_rate: float = 1e-3
    warmup: int = 200
    decay: int = 0
    weight_decay: float = 0.02
    clip: float = 3.0
    ema: float = 0.999
    dtype: str = "float32"
    log_every: int = 50
    checkpoint_every: int = 500

    def __post_init__(self):
        if self.warmup + self.decay > self.steps:
            raise UserError(
                f"warmup {self.warmup} and decay {self.decay} do not fit into"
                f" {self.steps} steps"
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig(RunConfig):
    """The settings of a run that trains a MAR image model.

    copies: the number of noise levels per token and step, which is MAR's diffusion
        batch multiplier.
    least_mask_ratio: the lower end of the mask ratio, which is drawn from a normal with
        mean 1, truncated to [least_mask_ratio, 1]. In MAR's training at most 30 % of
        the tokens are known, but a small model does not extrapolate from such contexts
        to fuller ones.
    mask_ratio_deviation: the standard deviation of that normal; MAR's is 0.25.
    focus: the share of the noise levels that are drawn where it is decided which of
        several possible contents a token has.
    max_weight: the largest weight of the squared error of eps. At high noise this error
        hardly depends on the token, so it is weighted by 1 / alpha_bar, which turns it
        into the squared error of the velocity, or by max_weight if that is smaller. 1
        is MAR's objective.
    hint: the weight of a second loss, which trains the backbone directly: the
        cross-entropy of the letter that a token shows, read from z by a fixed random
        matrix. It needs pictures of words, which come with their letters.
    settle: the number of first steps that show exactly five eighths of the tokens. A
        small model learns fastest from these how tokens depend on one another.
    on_grid: whether each position begins as a vector of its row plus a vector of its
        column, and the encoder's blocks begin as the identity. From MAR's random values
        small models hardly learn which tokens belong together.
    buckets: the number of ranges into which the number of known tokens is divided; the
        step is compiled once for each range.
    """

    model: MARConfig
    copies: int = 2
    least_mask_ratio: float = 0.02
    mask_ratio_deviation: float = 0.7
    focus: float = 0.0
    max_weight: float = 1.0
    hint: float = 0.0
    settle: int = 0
    on_grid: bool = False
    buckets: int = 4


@dataclasses.dataclass(frozen=True)
class HeadTrainConfig(RunConfig):
    """The settings of a run that trains a head to draft from its target's states, on
    rows of `data.length` ids. The target determines the sizes of the head. `model` says
    how many ids the head has, and which layers' states it reads.

    fed_back: how many times a step of training feeds the head's own states back to it,
        each time to draft one token further.
    """

    model: EagleConfig
    data: Texts
    fed_back: int = 2


Settings = TypeVar("Settings", bound=RunConfig)


def with_settings(config: Settings, settings: Iterable[str]) -> Settings:
    """Returns the configuration with some fields changed. Each setting is a text such
    as `steps=2000`, `model.encoder_width=64` or `data.fonts=cmr10,cmss10`."""
    parts = {"": config, "model": config.model, "data": config.data}
    known = {
        f"{part}.{field.name}".lstrip("."): getattr(of, field.name)
        for part, of in parts.items()
        for field in dataclasses.fields(of)
        if field.name not in parts
    }
    changes: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known:
            raise UserError(
                f"there is no setting {name!r}; there are {', '.join(known)}"
            )
        part, _, field = name.rpartition(".")
        try:
            changes[part][field] = _read(text, known[name])
        except (ValueError, KeyError):
            raise UserError(
                f"{setting!r} is not understood; {name} is {known[name]!r} now"
            ) from None
    own = changes.pop("")
    whole = {
        part: dataclasses.replace(parts[part], **changed)
        for part, changed in changes.items()
    }
    return dataclasses.replace(config, **whole, **own)


def _read(text: str, current: Any) -> Any:
    """Reads a text as a value of the same type as the field's current value."""
    if isinstance(current, bool):
        return {"true": True, "false": False}[text.lower()]
    return tuple(text.split(",")) if isinstance(current, tuple) else type(current)(text)


def in_steps(config: Settings, steps: int) -> Settings:
    """Returns the configuration with another number of steps. Warm-up, decay and settle
    change in proportion."""
    known = (name for name in ("warmup", "decay", "settle") if hasattr(config, name))
    phases = {name: getattr(config, name) * steps // config.steps for name in known}
    return dataclasses.replace(config, steps=steps, **phases)


def to_json(config: RunConfig) -> dict[str, object]:
    """Returns the settings as a JSON object; `data_kind` names the kind of data set."""
    kind = next(name for name, cls in DATA.items() if isinstance(config.data, cls))
    return {**dataclasses.asdict(config), "data_kind": kind}


def data_from_json(values: Mapping[str, Any]) -> object:
    """Returns the data set of a run's settings, given as a JSON object. Fields that the
    data set no longer has are ignored."""
    kind = DATA[values["data_kind"]]
    fields = {field.name for field in dataclasses.fields(kind)}
    return kind(
        **{
            name: tuple(of) if isinstance(of, list) else of
            for name, of in values["data"].items()
            if name in fields
        }
    )
