"""A tiny training run in a process of its own: `python tests/training_run.py OUT`."""

import pathlib
import sys

from cspd_jax.networks.config import MARConfig
from cspd_jax.training.config import TrainConfig
from cspd_jax.training.data.digits import Digits
from cspd_jax.training.image import mar
from cspd_jax.training.recipes import init_state
from cspd_jax.training.run import run

TINY = TrainConfig(
    model=MARConfig(
        seq_len=4,
        token_dim=16,
        num_classes=10,
        buffer_size=2,
        encoder_width=16,
        encoder_depth=1,
        encoder_heads=2,
        decoder_width=16,
        decoder_depth=1,
        decoder_heads=2,
        head_depth=1,
        head_width=16,
        respacing="ddim10",
        patch_size=4,
        vae_stride=1,
    ),
    data=Digits(8),
    steps=40,
    batch=8,
    learning_rate=3e-3,
    warmup=5,
    decay=10,
    copies=2,
    buckets=1,
    log_every=1,
    checkpoint_every=4,
)


def trained(out, config=TINY, source=None):
    """The final state of a run in the folder `out`, or of its going on."""
    out.mkdir(parents=True, exist_ok=True)
    return run(config, out, init_state(config), lambda c: mar.learning(c, source or c.data))[1]


if __name__ == "__main__":
    trained(pathlib.Path(sys.argv[1]))
