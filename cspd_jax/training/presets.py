"""Named settings of training runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from PIL import Image

from cspd_jax.check import UserError
from cspd_jax.networks.eagle import EagleConfig
from cspd_jax.networks.lm import LMConfig
from cspd_jax.networks.mar import MARConfig
from cspd_jax.networks.sphere import SphereConfig
from cspd_jax.tokenizers import CAUSAL_SIZE, END_OF_TEXT, MASK, MASKED_SIZE
from cspd_jax.training.config import HeadTrainConfig, RunConfig, TrainConfig
from cspd_jax.training.data.folder import Folder, list_images
from cspd_jax.training.data.glyphs import Glyphs
from cspd_jax.training.data.text import Texts
from cspd_jax.training.data.words import Words

_but = dataclasses.replace

# Models of 4x4 pixel patches. The MAR models among them are sampled with evenly spaced
# timesteps.
_PIXELS: dict[str, Any] = {
    "seq_len": 64,
    "token_dim": 16,
    "num_classes": 10,
    "patch_size": 4,
    "vae_stride": 1,
}
_SMALL = MARConfig(
    **_PIXELS,
    buffer_size=8,
    encoder_width=128,
    encoder_depth=3,
    encoder_heads=4,
    decoder_width=128,
    decoder_depth=3,
    decoder_heads=4,
    head_width=128,
    head_depth=3,
    respacing="ddim100",
)
_SMALLER = _but(
    _SMALL,
    encoder_width=64,
    encoder_depth=2,
    decoder_width=64,
    decoder_depth=2,
    head_width=96,
    head_depth=2,
)
_SMALL_CAUSAL = SphereConfig(
    **_PIXELS,
    class_tokens=4,
    width=128,
    depth=5,
    heads=4,
    head_width=128,
    head_depth=3,
    head_modulations=1,
    on_sphere=False,
)

_GLYPHS = TrainConfig(
    model=_SMALL,
    data=Glyphs(),
    learning_rate=1.2e-3,
    warmup=300,
    decay=6_000,
)
_GLYPHS_DRAFT = _but(
    _GLYPHS, model=_SMALLER, steps=5_000, learning_rate=2e-3, warmup=200, decay=4_000
)

_CAUSAL = RunConfig(
    model=_SMALL_CAUSAL,
    data=Glyphs(),
    steps=3_000,
    learning_rate=2e-3,
    decay=2_400,
)

# In pictures of words a token is the cell of one letter.
_OF_WORDS: dict[str, Any] = {"num_classes": 8, "token_dim": 64, "patch_size": 8}

_WORDS = _but(
    _GLYPHS,
    model=_but(_SMALL, **_OF_WORDS, encoder_depth=1, decoder_depth=2, head_width=192),
    data=Words(),
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
)
_WORDS_DRAFT = _but(_WORDS, model=_but(_SMALLER, **_OF_WORDS, encoder_depth=1))

# Llama models over bytes. They are deep and narrow. This costs no time on a CPU, where
# the time of a forward pass for one token is proportional to its operations.
_BYTES = LMConfig(
    family="llama",
    vocab_size=CAUSAL_SIZE,
    known_ids=CAUSAL_SIZE,
    width=96,
    depth=8,
    heads=2,
    kv_heads=2,
    head_dim=48,
    mlp_width=288,
    max_positions=1024,
    tie_embeddings=True,
    bos_ids=(END_OF_TEXT,),
    eos_ids=(END_OF_TEXT,),
)
# A masked-diffusion model with the sizes of the causal one, from whose weights it can
# start. Its longest text is a row of the data.
_MASKED_BYTES = _but(
    _BYTES,
    family="dream",
    vocab_size=MASKED_SIZE,
    known_ids=MASKED_SIZE,
    max_positions=256,
    causal=False,
    shifted=True,
    mask_ids=(MASK,),
)

# The same, causal between blocks, as SDAR is.
_BLOCK_BYTES = _but(_MASKED_BYTES, family="llama", shifted=False, block=8)

_TEXT = RunConfig(
    model=_BYTES,
    data=Texts(),
    steps=4_500,
    batch=8,
    learning_rate=3e-3,
    decay=4_300,
    weight_decay=0.1,
    clip=1.0,
    checkpoint_every=250,
)
_TEXT_DRAFT = _but(
    _TEXT,
    model=_but(
        _BYTES, width=128, depth=1, heads=4, kv_heads=4, head_dim=32, mlp_width=256
    ),
    steps=4_000,
    batch=16,
    warmup=100,
    decay=3_900,
)
_LONG: dict[str, Any] = {"data": Texts(1024), "steps": 400}
_MASKED = _but(_TEXT, model=_MASKED_BYTES, steps=5_000, learning_rate=2e-3, decay=4_800)

PRESETS: dict[str, RunConfig] = {
    "glyphs": _GLYPHS,
    "glyphs-draft": _GLYPHS_DRAFT,
    # For `distill --init` with a draft trained on the data.
    "glyphs-distill": _but(
        _GLYPHS_DRAFT, steps=1_500, learning_rate=5e-4, warmup=50, decay=1_200
    ),
    "glyphs-causal": _CAUSAL,
    "glyphs-causal-draft": _but(
        _CAUSAL,
        model=_but(_SMALL_CAUSAL, width=64, depth=2, head_width=96, head_depth=2),
        learning_rate=3e-3,
    ),
    "words": _WORDS,
    # For `train --init` with a model of the preset "words".
    "words-longer": _but(
        _WORDS, steps=8_000, learning_rate=2e-3, warmup=100, decay=7_000, seed=1
    ),
    "words-draft": _WORDS_DRAFT,
    # For `distill --init` with a draft trained on the data.
    "words-distill": _but(
        _WORDS_DRAFT,
        learning_rate=1e-3,
        warmup=100,
        copies=2,
        focus=0.0,
        max_weight=1.0,
        hint=0.0,
        settle=0,
    ),
    "words-causal": _but(
        _CAUSAL,
        model=_but(
            _SMALL_CAUSAL, **_OF_WORDS, width=96, depth=4, head_width=384, head_depth=3
        ),
        data=Words(),
        batch=16,
        steps=4_500,
        decay=3_300,
    ),
    "text-target": _TEXT,
    # For `train --init` with a target trained on short rows. Without this run its
    # attention would not extrapolate to longer rows.
    "text-target-long": _but(
        _TEXT, **_LONG, batch=2, learning_rate=6e-4, warmup=20, decay=380
    ),
    "text-draft": _TEXT_DRAFT,
    # For `distill --init` with a draft trained on the data.
    "text-distill": _but(
        _TEXT_DRAFT, **_LONG, batch=4, learning_rate=1e-3, warmup=50, decay=350
    ),
    # For `train --init` with a causal target.
    "masked-text": _MASKED,
    # For `train --init` with a model of the preset "masked-text".
    "masked-text-longer": _but(
        _MASKED, steps=16_000, learning_rate=2.5e-3, decay=13_000, seed=1
    ),
    # For `train --init` with a causal target.
    "block-text": _but(_MASKED, model=_BLOCK_BYTES, steps=3_600, decay=3_300),
    # For `distill --states`, which replaces the model by one that fits the target.
    "text-states": HeadTrainConfig(
        model=EagleConfig(_BYTES, (0,), _BYTES.width, _BYTES.vocab_size),
        data=Texts(192),
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
    ),
}

_MOST_SIDE = 64  # the most pixels along a side of a folder's images


def of_folder(root: str) -> TrainConfig:
    """Returns the settings of a run that trains a small model on the pictures in a
    folder. The side of the images is the shorter side of the first picture, at most 64
    pixels, rounded down to whole tokens. An image has at most 64 tokens."""
    names, files = list_images(root)
    with Image.open(files[0][0]) as first:
        side = min(*first.size, _MOST_SIDE)
        channels = 1 if first.mode in ("1", "L", "I;16") else 3
    patch = 4 if side < 36 else 8
    grid = side // patch
    sizes = {"seq_len": grid**2, "token_dim": patch**2 * channels, "patch_size": patch}
    data = Folder(
        root, grid * patch, channels, held_out=min(20, max(2, len(files) // 2))
    )
    model = _but(_SMALL, **sizes, num_classes=len(names))
    return _but(_GLYPHS, model=model, data=data)


def draft_of(target: MARConfig, data: object) -> TrainConfig:
    """Returns the settings of a run that trains a small draft model on `data`. The
    draft generates the same kind of tokens as the target."""
    names = (
        "seq_len",
        "token_dim",
        "num_classes",
        "respacing",
        "patch_size",
        "vae_stride",
    )
    model = _but(_SMALLER, **{name: getattr(target, name) for name in names})
    return _but(_GLYPHS_DRAFT, model=model, data=data)


def preset(name: str) -> RunConfig:
    """Returns the settings of a named run."""
    if name not in PRESETS:
        raise UserError(f"preset {name!r} is unknown; there are {', '.join(PRESETS)}")
    return PRESETS[name]
