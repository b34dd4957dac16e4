"""A tiny training run in a process of its own.

python tests/support/training_run.py OUT
"""

import dataclasses
import pathlib
import sys

import tiny

from cspd_jax.training.config import TrainConfig
from cspd_jax.training.data.glyphs import Glyphs
from cspd_jax.training.image import mar
from cspd_jax.training.recipes import init_state
from cspd_jax.training.run import run

TINY = TrainConfig(
    model=dataclasses.replace(tiny.PIXELS, seq_len=4, num_classes=10),
    data=Glyphs(fonts=("cmr10",), size=8),
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


def trained(out, config=TINY):
    """The final state of a run in the folder `out`, or of its going on."""
    out.mkdir(parents=True, exist_ok=True)
    return run(config, out, init_state(config), mar.learning(config))


if __name__ == "__main__":
    trained(pathlib.Path(sys.argv[1]))
