"""Named training runs, and configurations as plain JSON."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from cspd_jax.data.digits import DigitsConfig
from cspd_jax.data.folder import FolderConfig
from cspd_jax.data.glyphs import GlyphConfig
from cspd_jax.data.text import TextConfig
from cspd_jax.errors import UserError
from cspd_jax.networks.config import MAR_PRESETS, MARConfig
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.training.config import RunConfig, TextTrainConfig, TrainConfig
from cspd_jax.training.text_presets import TEXT_PRESETS

CONFIG_FILE = "config.json"
_DATA = {"glyphs": GlyphConfig, "digits": DigitsConfig, "folder": FolderConfig, "text": TextConfig}


def _small(seq_len: int, width: int, depth: int, head_width: int, head_depth: int, classes: int = 10):
    """A model on pixel patches of 4x4, sampled with the well conditioned spacing."""
    return MARConfig(
        seq_len=seq_len,
        token_dim=16,
        num_classes=classes,
        buffer_size=8,
        encoder_width=width,
        encoder_depth=depth,
        encoder_heads=4,
        decoder_width=width,
        decoder_depth=depth,
        decoder_heads=4,
        head_depth=head_depth,
        head_width=head_width,
        respacing="ddim100",
        patch_size=4,
        vae_stride=1,
    )


# A small model does not extrapolate from MAR's contexts, of which at most 30 % is known, to fuller ones.
_ALL_CONTEXTS = {"least_mask_ratio": 0.02, "mask_ratio_deviation": 0.7}

_GLYPHS_DRAFT = TrainConfig(
    model=_small(64, 64, 2, 96, 2),
    data=GlyphConfig(),
    steps=5_000,
    learning_rate=2e-3,
    warmup=200,
    decay=4_000,
    copies=2,
    sample_every=3_000,
    **_ALL_CONTEXTS,
)

PRESETS: dict[str, TrainConfig] = {
    "glyphs": TrainConfig(
        model=_small(64, 128, 3, 128, 3),
        data=GlyphConfig(),
        steps=10_000,
        learning_rate=1.2e-3,
        warmup=300,
        decay=6_000,
        copies=2,
        sample_every=3_000,
        **_ALL_CONTEXTS,
    ),
    "glyphs-draft": _GLYPHS_DRAFT,
    # For `distill --init` of a draft that has learnt the data.
    "glyphs-distill": dataclasses.replace(
        _GLYPHS_DRAFT, steps=1_500, learning_rate=5e-4, warmup=50, decay=1_200, sample_every=1_500
    ),
    "letters": TrainConfig(
        model=_small(64, 128, 3, 128, 3, classes=26),
        data=GlyphConfig(classes="ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
        steps=20_000,
        decay=12_000,
        **_ALL_CONTEXTS,
    ),
    "digits": TrainConfig(
        model=_small(16, 64, 2, 96, 2),
        data=DigitsConfig(size=16),
        steps=6_000,
        batch=64,
        learning_rate=2e-3,
        warmup=200,
        decay=4_000,
        **_ALL_CONTEXTS,
    ),
    "mar-base": TrainConfig(
        model=MAR_PRESETS["mar-base"],
        data=FolderConfig(flip=True),
        steps=400_000,
        batch=2048,
        learning_rate=8e-4,
        warmup=50_000,
        ema=0.9999,
        dtype="bfloat16",
        checkpoint_every=2_000,
        sample_every=10_000,
    ),
}


def preset(name: str) -> RunConfig:
    known = {**PRESETS, **TEXT_PRESETS}
    if name not in known:
        raise UserError(f"preset {name!r} is unknown; there are {', '.join(known)}")
    return known[name]


def to_json(config: RunConfig) -> dict[str, Any]:
    kind = next(name for name, cls in _DATA.items() if isinstance(config.data, cls))
    return {**dataclasses.asdict(config), "data_kind": kind}


def from_json(values: dict[str, Any]) -> RunConfig:
    values = dict(values)
    data = _DATA[values.pop("data_kind")]
    run, model = (TextTrainConfig, LMConfig) if data is TextConfig else (TrainConfig, MARConfig)
    values["model"] = model(**_hashable(values["model"]))
    values["data"] = data(**_hashable(values["data"]))
    return run(**values)


def _hashable(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def read(out: pathlib.Path) -> RunConfig | None:
    """The settings of the run in a folder; None if there is no run."""
    path = out / CONFIG_FILE
    if not path.exists():
        return None
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} does not hold the settings of a run ({error})") from None


def write(config: RunConfig, out: pathlib.Path) -> None:
    partial = out / f".{CONFIG_FILE}.partial"
    partial.write_text(json.dumps(to_json(config), indent=2) + "\n", encoding="utf-8")
    partial.replace(out / CONFIG_FILE)
