"""Records a small FLUX-type autoencoder and what it says, with PyTorch.

    python tests/golden/record_flux.py      # writes flux/ beside this file; needs torch

The modules have the names and the order of operations of NextStep-1's published autoencoder: an encoder and a
decoder of residual blocks, attention in the middle only, nothing around the latents. Weights are random.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

FOLDER = Path(__file__).parent / "flux"
SETTINGS = {
    "resolution": 32, "in_channels": 3, "ch": 8, "out_ch": 3, "ch_mult": [1, 2, 2, 2], "num_res_blocks": 1,
    "z_channels": 4, "scaling_factor": 0.7, "shift_factor": 0.2, "deterministic": True, "encoder_norm": True,
    "psz": 2,
}  # fmt: skip
GROUPS = 8


def norm(channels):
    return nn.GroupNorm(GROUPS, channels, eps=1e-6)


class Residual(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.norm1, self.conv1 = norm(before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = norm(after), nn.Conv2d(after, after, 3, padding=1)
        if before != after:
            self.nin_shortcut = nn.Conv2d(before, after, 1)

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class Attention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (part(h).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + self.proj_out(h.transpose(1, 2).reshape(x.shape))


class Step(nn.Module):
    """A change of the resolution by two."""

    def __init__(self, channels, down):
        super().__init__()
        self.down, self.conv = down, nn.Conv2d(channels, channels, 3, 2 if down else 1, 0 if down else 1)

    def forward(self, x):
        x = F.pad(x, (0, 1, 0, 1)) if self.down else F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv(x)


def middle(channels):
    part = nn.Module()
    part.block_1, part.attn_1 = Residual(channels, channels), Attention(channels)
    part.block_2 = Residual(channels, channels)
    return part


class Half(nn.Module):
    """The encoder or the decoder."""

    def __init__(self, s, encodes):
        super().__init__()
        widths = [s["ch"] * m for m in s["ch_mult"]]
        self.encodes, last = encodes, widths[-1]
        self.conv_in = (
            nn.Conv2d(s["in_channels"], s["ch"], 3, padding=1)
            if encodes
            else nn.Conv2d(s["z_channels"], last, 3, padding=1)
        )
        levels, before = [nn.Module() for _ in widths], s["ch"] if encodes else last
        for i in range(len(widths)) if encodes else reversed(range(len(widths))):
            blocks = []
            for _ in range(s["num_res_blocks"] + (not encodes)):
                blocks.append(Residual(before, widths[i]))
                before = widths[i]
            levels[i].block, levels[i].attn = nn.ModuleList(blocks), nn.ModuleList()
            if encodes and i + 1 < len(widths):
                levels[i].downsample = Step(before, True)
            if not encodes and i > 0:
                levels[i].upsample = Step(before, False)
        setattr(self, "down" if encodes else "up", nn.ModuleList(levels))
        self.mid, self.norm_out = middle(last), norm(before)
        self.conv_out = nn.Conv2d(before, 2 * s["z_channels"] if encodes else s["out_ch"], 3, padding=1)

    def forward(self, x):
        x = self.conv_in(x)
        x = x if self.encodes else self.through_the_middle(x)
        levels = self.down if self.encodes else reversed(self.up)
        for level in levels:
            for block in level.block:
                x = block(x)
            for name in ("downsample", "upsample"):
                x = getattr(level, name)(x) if hasattr(level, name) else x
        x = self.through_the_middle(x) if self.encodes else x
        return self.conv_out(F.silu(self.norm_out(x)))

    def through_the_middle(self, x):
        return self.mid.block_2(self.mid.attn_1(self.mid.block_1(x)))


class Autoencoder(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.encoder, self.decoder, self.side = Half(settings, True), Half(settings, False), settings["psz"]

    def mean(self, images):
        """Of the latents, normalised over the channels of each patch."""
        mean, side = self.encoder(images).chunk(2, dim=1)[0], self.side
        n, c, h, w = mean.shape
        patches = mean.reshape(n, c, h // side, side, w // side, side).permute(0, 2, 4, 1, 3, 5)
        flat = F.layer_norm(patches.flatten(3), (c * side * side,), eps=1e-6)
        return flat.reshape(patches.shape).permute(0, 3, 1, 4, 2, 5).reshape(mean.shape)


def main() -> None:
    torch.manual_seed(0)
    model = Autoencoder(SETTINGS)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    images, latents = torch.rand(2, 3, 32, 32) * 2 - 1, torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        found = {"mean": model.mean(images), "decoded": model.decoder(latents)}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "config.json").write_text(json.dumps(SETTINGS, indent=1) + "\n")
    torch.save(model.state_dict(), FOLDER / "checkpoint.pt")
    arrays = {"images": images, "latents": latents, **found}
    np.savez_compressed(FOLDER / "recorded.npz", **{name: a.numpy() for name, a in arrays.items()})


if __name__ == "__main__":
    main()
