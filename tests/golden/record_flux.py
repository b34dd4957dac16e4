"""Records a small FLUX-type autoencoder of random weights and what it says, as
diffusers computes it.

    python tests/golden/record_flux.py  # writes flux/ beside this file; needs diffusers

The file has the names of NextStep-1's published autoencoder: attention in the middle
only, nothing around the latents. Its latents are normalised over the numbers of each
patch, which is done here.
"""

import json
import re
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL

FOLDER = Path(__file__).parent / "flux"
SETTINGS = {
    "resolution": 32,
    "in_channels": 3,
    "ch": 8,
    "out_ch": 3,
    "ch_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "z_channels": 4,
    "scaling_factor": 0.7,
    "shift_factor": 0.2,
    "deterministic": True,
    "encoder_norm": True,
    "psz": 2,
}
NAMES = (
    (r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2"),
    (
        r"up_blocks\.(\d)\.resnets\.(\d)",
        lambda found: f"up.{3 - int(found[1])}.block.{found[2]}",
    ),
    (r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample"),
    (
        r"up_blocks\.(\d)\.upsamplers\.0",
        lambda found: f"up.{3 - int(found[1])}.upsample",
    ),
    (r"mid_block\.resnets\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}"),
    (r"mid_block\.attentions\.0", "mid.attn_1"),
    (r"group_norm", "norm"),
    (r"to_out\.0", "proj_out"),
    (r"to_([qkv])", r"\1"),
    (r"conv_shortcut", "nin_shortcut"),
    (r"conv_norm_out", "norm_out"),
)


def published(state):
    found = {}
    for name, tensor in state.items():
        for theirs, ours in NAMES:
            name = re.sub(theirs, ours, name)
        # Convolutions of one pixel in the published file.
        products = "attn_1" in name and tensor.ndim == 2
        found[name] = tensor[:, :, None, None] if products else tensor
    return found


def normalised(mean, side):
    n, c, h, w = mean.shape
    patches = mean.reshape(n, c, h // side, side, w // side, side).permute(
        0, 2, 4, 1, 3, 5
    )
    flat = torch.nn.functional.layer_norm(
        patches.flatten(3), (c * side * side,), eps=1e-6
    )
    return flat.reshape(patches.shape).permute(0, 3, 1, 4, 2, 5).reshape(mean.shape)


@torch.no_grad()
def main():
    torch.manual_seed(0)
    model = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[SETTINGS["ch"] * factor for factor in SETTINGS["ch_mult"]],
        latent_channels=SETTINGS["z_channels"],
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    images = torch.rand(2, 3, 32, 32) * 2 - 1
    latents = torch.randn(2, 4, 4, 4)
    arrays = {
        "images": images,
        "latents": latents,
        "mean": normalised(model.encode(images).latent_dist.mean, SETTINGS["psz"]),
        "decoded": model.decode(latents).sample,
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "config.json").write_text(json.dumps(SETTINGS, indent=1) + "\n")
    torch.save(published(model.state_dict()), FOLDER / "checkpoint.pt")
    np.savez_compressed(
        FOLDER / "recorded.npz", **{name: a.numpy() for name, a in arrays.items()}
    )


if __name__ == "__main__":
    main()
