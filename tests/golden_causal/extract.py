"""Makes the files of the S-VAE beside it from the recorded ones of whole SphereAR models.

    python tests/golden_causal/extract.py DIR    # DIR holds sphere_tiny.pth, .npz, ...

A `*_vae.npz` keeps the arrays that the tests read, `sphere_tiny2_vae.pth` the tensors `vae.*` as they lie in
the whole file: their types, and the strides of images stored with channels last.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch_file  # noqa: E402

from cspd_jax.converters.torch_tensors import LazyTensor  # noqa: E402
from cspd_jax.converters.torch_zip import open_checkpoint  # noqa: E402

ARRAYS = re.compile(
    r"vae/image|vae/enc/(patchify|layer\d+|enc|quant|mu|kappa|beta_draw|tangent_noise|sample|kl)"
    r"|vae/dec/(conv_in|layer\d+|image)|vae/freqs_cis|net/latents|gen/cfg1_n[56]/(latents|image|image_u8)"
)
KEYS = ("sphere_b", "sphere_l", "sphere_h", "sphere_vae")


def as_it_lies(tensor: LazyTensor) -> torch_file.Tensor:
    flat = np.lib.stride_tricks.as_strided(
        tensor.numpy(), (int(np.prod(tensor.shape)),), (tensor.dtype.itemsize,)
    )
    return torch_file.Tensor(torch_file.storage(flat), tensor.shape, tensor.strides)


def main(folder: Path) -> None:
    for name in ("sphere_tiny", "sphere_tiny2"):
        recorded = np.load(folder / f"{name}.npz")
        kept = {key: recorded[key] for key in recorded.files if ARRAYS.fullmatch(key)}
        np.savez_compressed(HERE / f"{name}_vae.npz", **kept)
    whole = open_checkpoint(folder / "sphere_tiny2.pth")["model"]
    state = {key: as_it_lies(value) for key, value in whole.items() if key.startswith("vae.")}
    tree = {
        "model": torch_file.ordered_dict(state),
        "optimizer": {},
        "epochs": 1,
        "args": torch_file.namespace(),
    }
    torch_file.write(HERE / "sphere_tiny2_vae.pth", tree)
    for name in KEYS:
        shutil.copyfile(folder / f"{name}_keys.json", HERE / f"{name}_keys.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
