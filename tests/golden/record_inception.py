"""Records what pytorch-fid makes of random Inception weights, in float64, for tests
without PyTorch.

    # Writes inception.npz beside itself; needs pytorch-fid.
    python tests/golden/record_inception.py

The weights and the images are not stored: `tests/support/inception_random.py` makes
them again from names and a seed.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from pytorch_fid import inception

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

import inception_random  # noqa: E402

EVERY = 7  # of the pixels of the resized images, in each direction


def as_tensorflow_1(x, axis):
    """Output i is read at i * (size / 299), and beyond the last pixel is the last
    pixel."""
    size = x.shape[axis]
    at = torch.arange(299, dtype=torch.float64) * (size / 299)
    below = at.floor().long()
    above = torch.clamp(below + 1, max=size - 1)
    share = (at - below).reshape([-1 if i == axis else 1 for i in range(4)])
    return (
        x.index_select(axis, below) * (1 - share) + x.index_select(axis, above) * share
    )


def record():
    weights = {
        name: torch.as_tensor(array)
        for name, array in inception_random.weights().items()
    }
    inception.load_state_dict_from_url = lambda *_, **__: weights
    network = inception.fid_inception_v3().double().eval()
    seen = {}
    for name, layer in (
        ("spatial", network.Mixed_6d.branch1x1),
        ("pool", network.avgpool),
    ):
        layer.register_forward_hook(
            lambda _, given, out, name=name: seen.update({name: out})
        )
    x = torch.as_tensor(inception_random.images()).permute(0, 3, 1, 2).double()
    tf1 = (as_tensorflow_1(as_tensorflow_1(x, 2), 3) - 128) / 128
    other = (
        2 * torch.nn.functional.interpolate(x / 255, size=(299, 299), mode="bilinear")
        - 1
    )
    logits = network(tf1)
    return {
        "resized/tf1": tf1.permute(0, 2, 3, 1)[:, ::EVERY, ::EVERY],
        "resized/pytorch-fid": other.permute(0, 2, 3, 1)[:, ::EVERY, ::EVERY],
        "pool": seen["pool"].flatten(1),
        "spatial": seen["spatial"][:, :7].permute(0, 2, 3, 1).flatten(1),
        "unbiased": logits - network.fc.bias,
        "logits": logits,
    }


if __name__ == "__main__":
    with torch.no_grad():
        arrays = {
            name: value.numpy().astype(np.float32) for name, value in record().items()
        }
    np.savez_compressed(HERE / "inception.npz", **arrays)
