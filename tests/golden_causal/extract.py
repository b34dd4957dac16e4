"""Makes the files of SphereAR beside it from the recorded ones of whole models.

    python tests/golden_causal/extract.py DIR    # DIR holds sphere_tiny.pth, .npz, ...

`*_vae.npz` and `*_ar.npz` keep the arrays that the tests read, `*_vae.pth` the tensors
`vae.*` and `*_ar.pth` the others, as they lie in the whole file: their types, and the
strides of images stored with channels last.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

import torch_writer  # noqa: E402

from cspd_jax.converters.torch_file import open_checkpoint  # noqa: E402

ARRAYS = re.compile(
    r"vae/image|vae/enc/(quant|mu|kappa|beta_draw|tangent_noise|sample|kl)|vae/dec/image|net/latents"
    r"|gen/cfg1_n5/(latents|image_u8)"
)
OF_BACKBONE = re.compile(
    r"gen/[^/]*/(labels|settings|latents|pos\d+/(init_noise|step_noise))"
    r"|train/(latents|labels|t_normal|noise|loss|grad/.*)"
)
KEYS = ("sphere_b", "sphere_l", "sphere_h")


def as_it_lies(tensor):
    flat = np.lib.stride_tricks.as_strided(
        tensor.numpy(), (int(np.prod(tensor.shape)),), (tensor.dtype.itemsize,)
    )
    return torch_writer.Tensor(flat, tensor.shape, tensor.strides)


def write(file, name, whole, of_vae):
    """A training checkpoint with a part of the weights."""
    state = {
        key: as_it_lies(value)
        for key, value in whole.items()
        if key.startswith("vae.") == of_vae
    }
    torch_writer.write(
        HERE / f"{file}.pth", {name: state, "args": argparse.Namespace()}
    )


def main(folder):
    for name in ("sphere_tiny", "sphere_tiny2"):
        recorded = np.load(folder / f"{name}.npz")
        kept = {key: recorded[key] for key in recorded.files if ARRAYS.fullmatch(key)}
        np.savez_compressed(HERE / f"{name}_vae.npz", **kept)
        kept = {
            key: recorded[key] for key in recorded.files if OF_BACKBONE.fullmatch(key)
        }
        np.savez_compressed(HERE / f"{name}_ar.npz", **kept)
    tiny, tiny2 = (
        open_checkpoint(folder / f"{name}.pth")
        for name in ("sphere_tiny", "sphere_tiny2")
    )
    write("sphere_tiny_ar", "ema", tiny["ema"], of_vae=False)
    write("sphere_tiny2_ar", "model", tiny2["model"], of_vae=False)
    write("sphere_tiny2_vae", "model", tiny2["model"], of_vae=True)
    for name in KEYS:
        shutil.copyfile(folder / f"{name}_keys.json", HERE / f"{name}_keys.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
