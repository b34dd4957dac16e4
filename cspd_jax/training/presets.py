"""Named settings of training runs; those of language models are in `training.text.presets`."""

from __future__ import annotations

import dataclasses
from typing import Any

from cspd_jax.errors import UserError
from cspd_jax.networks.config import MAR_PRESETS, MARConfig, SphereConfig
from cspd_jax.training.config import FlowTrainConfig, ImageTrainConfig, RunConfig, TrainConfig
from cspd_jax.training.data.digits import DigitsConfig
from cspd_jax.training.data.folder import FolderConfig, look
from cspd_jax.training.data.glyphs import GlyphConfig
from cspd_jax.training.data.words import WordsConfig
from cspd_jax.training.text.presets import HEAD_PRESETS, TEXT_PRESETS


def _small(seq_len: int, width: int, depth: int, head_width: int, head_depth: int, classes: int = 10):
    """A model of 4x4 pixel patches, sampled with evenly spaced timesteps."""
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


def _small_causal(seq_len: int, width: int, depth: int, head_width: int, head_depth: int, classes: int = 10):
    """A causal model of 4x4 pixel patches, which lie on no sphere."""
    return SphereConfig(
        seq_len=seq_len,
        token_dim=16,
        num_classes=classes,
        class_tokens=4,
        width=width,
        depth=depth,
        heads=4,
        head_depth=head_depth,
        head_width=head_width,
        head_modulations=1,
        on_sphere=False,
        patch_size=4,
        vae_stride=1,
    )


# In MAR's training at most 30 % of the tokens are known; a small model does not extrapolate to fuller
# contexts.
_ALL_CONTEXTS: dict[str, Any] = {"least_mask_ratio": 0.02, "mask_ratio_deviation": 0.7}

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

# A token is the cell of a letter.
_OF_WORDS: dict[str, Any] = {"token_dim": 64, "patch_size": 8}
_WORDS = WordsConfig(indents=1)

_WORDS_TARGET = TrainConfig(
    model=dataclasses.replace(_small(64, 128, 2, 192, 3, classes=8), **_OF_WORDS, encoder_depth=1),
    data=_WORDS,
    steps=12_000,
    batch=16,
    learning_rate=2.5e-3,
    warmup=200,
    decay=9_000,
    clip=1.0,
    copies=4,
    focus=0.8,
    max_weight=10.0,
    hint=0.5,
    settle=1_500,
    on_grid=True,
    sample_every=2_000,
    **_ALL_CONTEXTS,
)
_WORDS_DRAFT = dataclasses.replace(
    _WORDS_TARGET,
    model=dataclasses.replace(_small(64, 64, 2, 96, 2, classes=8), **_OF_WORDS, encoder_depth=1),
)

_GLYPHS = TrainConfig(
    model=_small(64, 128, 3, 128, 3),
    data=GlyphConfig(),
    steps=10_000,
    learning_rate=1.2e-3,
    warmup=300,
    decay=6_000,
    copies=2,
    sample_every=3_000,
    **_ALL_CONTEXTS,
)

PRESETS: dict[str, ImageTrainConfig] = {
    "glyphs": _GLYPHS,
    "glyphs-draft": _GLYPHS_DRAFT,
    # For `distill --init` with a draft trained on the data.
    "glyphs-distill": dataclasses.replace(
        _GLYPHS_DRAFT, steps=1_500, learning_rate=5e-4, warmup=50, decay=1_200, sample_every=1_500
    ),
    "glyphs-causal": FlowTrainConfig(
        model=_small_causal(64, 128, 5, 128, 3),
        data=GlyphConfig(),
        steps=3_000,
        learning_rate=2e-3,
        warmup=200,
        decay=2_400,
        copies=2,
        sample_every=1_000,
    ),
    "glyphs-causal-draft": FlowTrainConfig(
        model=_small_causal(64, 64, 2, 96, 2),
        data=GlyphConfig(),
        steps=3_000,
        learning_rate=3e-3,
        warmup=200,
        decay=2_400,
        copies=2,
        sample_every=1_000,
    ),
    "words": _WORDS_TARGET,
    # For `train --init` with a model of the preset before.
    "words-longer": dataclasses.replace(
        _WORDS_TARGET, steps=8_000, learning_rate=2e-3, warmup=100, decay=7_000, seed=1
    ),
    "words-draft": _WORDS_DRAFT,
    # For `distill --init` with a draft trained on the data.
    "words-distill": dataclasses.replace(
        _WORDS_DRAFT,
        learning_rate=1e-3,
        warmup=100,
        copies=2,
        focus=0.0,
        max_weight=1.0,
        hint=0.0,
        settle=0,
        sample_every=1_500,
    ),
    "words-causal": FlowTrainConfig(
        model=dataclasses.replace(_small_causal(64, 96, 4, 112, 2, classes=8), **_OF_WORDS),
        data=_WORDS,
        steps=6_000,
        learning_rate=2e-3,
        warmup=200,
        decay=4_800,
        copies=2,
        sample_every=2_000,
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


_MOST_SIDE = 64  # pixels of an image in such a run
_MOST_TOKENS = 64


def of_folder(root: str) -> TrainConfig:
    """A small model of the pictures in a folder: of their own size up to 64 x 64, in at most 64 tokens."""
    found = look(root)
    patch = 4
    while (min(found.side, _MOST_SIDE) // patch) ** 2 > _MOST_TOKENS:
        patch *= 2
    side = min(found.side, _MOST_SIDE) // patch
    model = dataclasses.replace(
        _small(side**2, 128, 3, 128, 3, found.classes), token_dim=patch**2 * found.channels, patch_size=patch
    )
    data = FolderConfig(root, side * patch, found.channels, held_out=min(20, max(2, found.images // 2)))
    return dataclasses.replace(_GLYPHS, model=model, data=data, sample_every=1_000)


def draft_of(target: MARConfig, data: Any) -> TrainConfig:
    """A model of half the width that makes the target's tokens, and learns on `data`."""
    half = lambda width, heads: max(heads, width // 2 // heads * heads)
    model = dataclasses.replace(
        target,
        encoder_width=half(target.encoder_width, target.encoder_heads),
        encoder_depth=max(1, target.encoder_depth * 2 // 3),
        decoder_width=half(target.decoder_width, target.decoder_heads),
        decoder_depth=max(1, target.decoder_depth * 2 // 3),
        head_width=max(32, target.head_width * 3 // 4),
        head_depth=max(1, target.head_depth * 2 // 3),
    )
    return dataclasses.replace(_GLYPHS_DRAFT, model=model, data=data)


def preset(name: str) -> RunConfig:
    """Returns the settings of a named run."""
    known = {**PRESETS, **TEXT_PRESETS, **HEAD_PRESETS}
    if name not in known:
        raise UserError(f"preset {name!r} is unknown; there are {', '.join(known)}")
    return known[name]
