"""Named training runs of language models."""

from __future__ import annotations

import dataclasses

from cspd_jax.byte_tokenizer import CAUSAL_SIZE, END_OF_TEXT, MASK, MASKED_SIZE
from cspd_jax.data.text import TextConfig
from cspd_jax.networks.lm_config import LMConfig
from cspd_jax.training.config import TextTrainConfig

_POSITIONS = 1024


def byte_model(
    width: int, depth: int, heads: int, mlp_width: int, causal: bool = True, positions: int = _POSITIONS
) -> LMConfig:
    """A Llama over bytes, or its masked-diffusion sibling, which can begin with its weights."""
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

# Deep and narrow: on a CPU a forward pass for one token costs about as much as it has operations.
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

TEXT_PRESETS: dict[str, TextTrainConfig] = {
    "text-target": _TARGET,
    # For `train --init` of a target that has learnt short rows: attention does not reach farther than it
    # was trained to.
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
    # For `distill --init` of a draft that has learnt the data.
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
    # For `train --init` of a causal target; it learns from its own objective what else a mask may hide.
    "masked-text": TextTrainConfig(
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
    ),
}
