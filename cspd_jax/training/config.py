"""The settings of a training run, as frozen dataclasses: changed by name, and written
as JSON."""

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
    """The settings that every training run has. Those of a causal image model and of a
    language model have no others; `model` decides what they learn.

    model: the configuration of the network.
    data: the data set.
    steps: batches that the run takes.
    batch: images, or rows of text, per step.
    accumulate: batches whose mean gradient makes one step of the optimiser.
    seed: of everything random.
    learning_rate: of AdamW, after warm-up.
    warmup: steps of linear warm-up.
    decay: the learning rate falls along a cosine over this many last steps; 0 keeps it
        constant.
    weight_decay: acts on matrices and embeddings only, and not on a head.
    clip: largest global norm of a gradient.
    ema: decay of the averaged weights, or (1 + step) / (10 + step) while that is
        smaller.
    dtype: of the activations, float32 or bfloat16.
    log_every: steps per line of the log.
    checkpoint_every: steps between checkpoints.
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

    copies: noise levels per token and step, MAR's diffusion batch multiplier.
    least_mask_ratio: the mask ratio is a normal with mean 1, truncated to
        [least_mask_ratio, 1]. In MAR's training at most 30 % of the tokens are known; a
        small model does not extrapolate to fuller contexts.
    mask_ratio_deviation: the standard deviation of that normal, 0.25 in MAR's.
    focus: share of the noise levels that are drawn where it is decided which of several
        things a token shows.
    max_weight: at high noise the squared error of eps hardly depends on the token, so
        it counts as much as that of the velocity would, 1 / alpha_bar times, up to
        this; 1 is MAR's objective.
    hint: weight of a second loss, on what the backbone knows: the cross-entropy of the
        letter that a token shows, read from z by a fixed random matrix. For pictures of
        words, which come with their letters.
    settle: so many first steps show five eighths of the tokens each, from which a small
        model learns soonest how tokens depend on one another.
    on_grid: positions begin as a row's vector plus a column's and the encoder's blocks
        as the identity, in place of MAR's random values, from which small models hardly
        learn which tokens belong together.
    buckets: number of ranges of the number of known tokens; the step is compiled once
        for each.
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
    rows of `data.length` ids. What it has of the target, it takes from there: `model`
    says how many ids it has of its own, and which layers' states it reads.

    fed_back: how often its own states are fed back in a step of training, each time one
        token further.
    """

    model: EagleConfig
    data: Texts
    fed_back: int = 2


Settings = TypeVar("Settings", bound=RunConfig)


def with_settings(config: Settings, settings: Iterable[str]) -> Settings:
    """Returns the configuration with fields changed by texts such as `steps=2000`,
    `model.encoder_width=64` or `data.fonts=cmr10,cmss10`."""
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
    """Reads a text as a value of the kind that the field has now."""
    if isinstance(current, bool):
        return {"true": True, "false": False}[text.lower()]
    return tuple(text.split(",")) if isinstance(current, tuple) else type(current)(text)


def in_steps(config: Settings, steps: int) -> Settings:
    """Returns the configuration with another number of steps, and its phases in
    proportion."""
    known = (name for name in ("warmup", "decay", "settle") if hasattr(config, name))
    phases = {name: getattr(config, name) * steps // config.steps for name in known}
    return dataclasses.replace(config, steps=steps, **phases)


def to_json(config: RunConfig) -> dict[str, object]:
    """Returns the settings as a JSON object; `data_kind` names the kind of data set."""
    kind = next(name for name, cls in DATA.items() if isinstance(config.data, cls))
    return {**dataclasses.asdict(config), "data_kind": kind}


def data_from_json(values: Mapping[str, Any]) -> object:
    """Returns the data set in the settings of a run, given as JSON. What it no longer
    has is left out."""
    kind = DATA[values["data_kind"]]
    fields = {field.name for field in dataclasses.fields(kind)}
    return kind(
        **{
            name: tuple(of) if isinstance(of, list) else of
            for name, of in values["data"].items()
            if name in fields
        }
    )
