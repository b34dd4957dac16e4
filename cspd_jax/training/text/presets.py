"""Named settings of language models, and of heads that draft for them."""

from __future__ import annotations

import dataclasses

from cspd_jax.networks.eagle_config import EagleConfig
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.training.config import HeadTrainConfig, TextTrainConfig
from cspd_jax.training.data.text import TextConfig
from cspd_jax.weights.tokenizers import CAUSAL_SIZE, END_OF_TEXT, MASK, MASKED_SIZE

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


_DRAFT = TextTrainConfig(
    model=byte_model(128, 1, 4, 256),
    data=TextConfig(),
    steps=4_000,
    batch=16,
    learning_rate=3e-3,
    warmup=100,
    decay=3_900,
    weight_decay=0.1,
    clip=1.0,
    sample_every=1_000,
)

# Deep and narrow: on a CPU the cost of a forward pass for one token is proportional to its operations.
_TARGET = TextTrainConfig(
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

_MASKED = TextTrainConfig(
    model=byte_model(96, 8, 2, 288, causal=False, positions=256),  # as long as its rows
    data=TextConfig(),
    steps=5_000,
    batch=8,
    learning_rate=2e-3,
    warmup=200,
    decay=4_800,
    weight_decay=0.1,
    clip=1.0,
    checkpoint_every=250,
    sample_every=500,
)

TEXT_PRESETS: dict[str, TextTrainConfig] = {
    "text-target": _TARGET,
    # For `train --init` with a target trained on short rows: attention does not extrapolate to longer ones.
    "text-target-long": dataclasses.replace(
        _TARGET,
        data=TextConfig(_POSITIONS),
        steps=400,
        batch=2,
        learning_rate=6e-4,
        warmup=20,
        decay=380,
        sample_every=0,
    ),
    "text-draft": _DRAFT,
    # For `distill --init` with a draft trained on the data.
    "text-distill": dataclasses.replace(
        _DRAFT,
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
