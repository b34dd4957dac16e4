"""Records what PyTorch computes with the FID Inception network at random weights, for tests without it.

    python tests/golden/record_inception.py    # writes inception.npz beside itself

The weights and the images are not stored: `tests/inception_reference.py` makes them again from names and a
seed. Everything is computed in float64 and stored as float32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import inception_reference as reference  # noqa: E402

EVERY = 7  # of the pixels of the resized images, in each direction


def record() -> dict[str, np.ndarray]:
    weights, images = reference.weights(), reference.images()
    found = {}
    for how in ("tf1", "pytorch-fid"):
        x = reference.resized(images, how)
        found[f"{how}/resized"] = x.permute(0, 2, 3, 1).numpy()[:, ::EVERY, ::EVERY]
        found |= {f"{how}/{name}": value for name, value in reference.outputs(weights, x).items()}
    wrong = reference.outputs(weights, reference.resized(images, "tf1"), average_counts_padding=True)
    found["wrong pooling/pool"] = wrong["pool"]
    kept = ("resized", "pool")
    return {
        name: value.astype(np.float32)
        for name, value in found.items()
        if name.startswith("tf1/") or name.split("/")[1] in kept
    }


if __name__ == "__main__":
    np.savez_compressed(HERE / "inception.npz", **record())
    print(f"inception.npz: {(HERE / 'inception.npz').stat().st_size / 1000:.0f} kB")
