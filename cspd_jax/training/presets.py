"""Named settings of training runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from cspd_jax.errors import UserError
from cspd_jax.networks.config import MAR_PRESETS, MARConfig, SphereConfig
from cspd_jax.networks.eagle_config import EagleConfig
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.training.config import (
    FlowTrainConfig,
    HeadTrainConfig,
    ImageTrainConfig,
    RunConfig,
    TextTrainConfig,
    TrainConfig,
)
from cspd_jax.training.data.digits import DigitsConfig
from cspd_jax.training.data.folder import FolderConfig, look
from cspd_jax.training.data.glyphs import GlyphConfig
from cspd_jax.training.data.text import TextConfig
from cspd_jax.training.data.words import WordsConfig
from cspd_jax.weights.tokenizers import CAUSAL_SIZE, END_OF_TEXT, MASK, MASKED_SIZE


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
_GLYPHS_DRAFT = dataclasses.replace(
    _GLYPHS, model=_small(64, 64, 2, 96, 2), steps=5_000, learning_rate=2e-3, warmup=200, decay=4_000
)

_CAUSAL = FlowTrainConfig(
    model=_small_causal(64, 128, 5, 128, 3),
    data=GlyphConfig(),
    steps=3_000,
    learning_rate=2e-3,
    warmup=200,
    decay=2_400,
    copies=2,
    sample_every=1_000,
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


PRESETS: dict[str, ImageTrainConfig] = {
    "glyphs": _GLYPHS,
    "glyphs-draft": _GLYPHS_DRAFT,
    # For `distill --init` with a draft trained on the data.
    "glyphs-distill": dataclasses.replace(
        _GLYPHS_DRAFT, steps=1_500, learning_rate=5e-4, warmup=50, decay=1_200, sample_every=1_500
    ),
    "glyphs-causal": _CAUSAL,
    "glyphs-causal-draft": dataclasses.replace(
        _CAUSAL, model=_small_causal(64, 64, 2, 96, 2), learning_rate=3e-3
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
    "words-causal": dataclasses.replace(
        _CAUSAL,
        model=dataclasses.replace(_small_causal(64, 96, 4, 112, 2, classes=8), **_OF_WORDS),
        data=_WORDS,
        steps=6_000,
        decay=4_800,
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


_POSITIONS = 1024  # of a byte model


def byte_model(
    width: int, depth: int, heads: int, mlp_width: int, causal: bool = True, positions: int = _POSITIONS
) -> LMConfig:
    """A Llama over bytes, or a masked-diffusion model of the same shape, which can start from its weights."""
    size = CAUSAL_SIZE if causal else MASKED_SIZE
    return LMConfig(
        family="llama" if causal else "dream",
        vocab_size=size,
        known_ids=size,
        width=width,
        depth=depth,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        mlp_width=mlp_width,
        max_positions=positions,
        tie_embeddings=True,
        causal=causal,
        shifted=not causal,
        bos_ids=(END_OF_TEXT,),
        eos_ids=(END_OF_TEXT,),
        mask_ids=() if causal else (MASK,),
    )


# Deep and narrow: on a CPU the cost of a forward pass for one token is proportional to its operations.
_TEXT_TARGET = TextTrainConfig(
    model=byte_model(96, 8, 2, 288),
    data=TextConfig(),
    steps=4_500,
    batch=8,
    learning_rate=3e-3,
    warmup=200,
    decay=4_300,
    weight_decay=0.1,
    clip=1.0,
    checkpoint_every=250,
    sample_every=500,
)

_TEXT_DRAFT = dataclasses.replace(
    _TEXT_TARGET,
    model=byte_model(128, 1, 4, 256),
    steps=4_000,
    batch=16,
    warmup=100,
    decay=3_900,
    checkpoint_every=500,
    sample_every=1_000,
)
_MASKED = dataclasses.replace(
    _TEXT_TARGET,
    model=byte_model(96, 8, 2, 288, causal=False, positions=256),  # as long as its rows
    steps=5_000,
    learning_rate=2e-3,
    decay=4_800,
)

TEXT_PRESETS: dict[str, TextTrainConfig] = {
    "text-target": _TEXT_TARGET,
    # For `train --init` with a target trained on short rows: attention does not extrapolate to longer ones.
    "text-target-long": dataclasses.replace(
        _TEXT_TARGET,
        data=TextConfig(_POSITIONS),
        steps=400,
        batch=2,
        learning_rate=6e-4,
        warmup=20,
        decay=380,
        sample_every=0,
    ),
    "text-draft": _TEXT_DRAFT,
    # For `distill --init` with a draft trained on the data.
    "text-distill": dataclasses.replace(
        _TEXT_DRAFT,
        data=TextConfig(_POSITIONS),
        steps=400,
        batch=4,
        learning_rate=1e-3,
        warmup=50,
        decay=350,
        sample_every=0,
    ),
    # For `train --init` with a causal target.
    "masked-text": _MASKED,
    # For `train --init` with a model of the preset before.
    "masked-text-longer": dataclasses.replace(
        _MASKED, steps=16_000, learning_rate=2.5e-3, decay=13_000, sample_every=1_000, seed=1
    ),
}


# For `distill --states`; the sizes of the model are the target's.
_LAYER = dataclasses.replace(byte_model(96, 1, 2, 288), tie_embeddings=False)
HEAD_PRESETS: dict[str, HeadTrainConfig] = {
    "text-states": HeadTrainConfig(
        model=EagleConfig(_LAYER, (0,), _LAYER.width, _LAYER.vocab_size),
        data=TextConfig(192),
        steps=8_000,
        batch=2,
        learning_rate=1.5e-3,
        warmup=100,
        decay=7_900,
        weight_decay=0.01,
        clip=1.0,
        ema=0.99,
        log_every=20,
        checkpoint_every=250,
        sample_every=500,
    )
}


_MOST_SIDE = 64  # pixels of an image in such a run
_MOST_TOKENS = 64


def of_folder(root: str) -> TrainConfig:
    """A small model of the pictures in a folder: of their own size up to 64 x 64, in at most 64 tokens."""
    classes, images, shorter, channels = look(root)
    patch = 4
    while (min(shorter, _MOST_SIDE) // patch) ** 2 > _MOST_TOKENS:
        patch *= 2
    side = min(shorter, _MOST_SIDE) // patch
    model = dataclasses.replace(
        _small(side**2, 128, 3, 128, 3, classes), token_dim=patch**2 * channels, patch_size=patch
    )
    data = FolderConfig(root, side * patch, channels, held_out=min(20, max(2, images // 2)))
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
