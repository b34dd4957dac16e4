"""Records the losses of an S-VAE in training and their gradients, with PyTorch.

    python tests/golden/record_svae_training.py      # writes svae_training.npz beside this file; needs torch

The autoencoder has the names and the order of operations of SphereAR's, the critic those of PatchGAN. Weights
are random, and made by `weights` alone, so they are not recorded; nor are gradients of many numbers, of which
the norms are. The draws of the posterior are held fixed.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "svae_training.npz"
CHANNELS, REGISTERS, LATENT, IMAGE, SIDE, CRITIC = (8, 16, 64), 2, 5, 1, 16, 8
KL_WEIGHT, CRITIC_WEIGHT = 0.004, 0.3
HIDDEN = 256  # of the transformers' MLP
_SMALL = 300  # numbers of a gradient that is recorded whole


def shapes():
    """By name: of the autoencoder, and of the critic."""
    wide = CHANNELS[-1]
    found = {
        "encoder.conv_in.weight": (CHANNELS[0], IMAGE, 3, 3), "encoder.norm.weight": (wide,),
        "encoder.output.weight": (wide, wide), "quant_proj.weight": (LATENT + 1, wide),
        "quant_proj.bias": (LATENT + 1,), "post_quant_proj.weight": (wide, LATENT),
        "decoder.conv_in.1.weight": (wide, wide, 3, 3), "decoder.conv_out.0.weight": (CHANNELS[0],),
        "decoder.conv_out.0.bias": (CHANNELS[0],), "decoder.conv_out.2.weight": (IMAGE, CHANNELS[0], 3, 3),
    }  # fmt: skip
    for part in ("encoder", "decoder"):
        found[f"{part}.register_token.weight"] = (REGISTERS, wide)
        block = f"{part}.layers.0"
        found |= {f"{block}.{name}.weight": (wide,) for name in ("attention_norm", "ffn_norm")}
        found[f"{block}.attention.wqkv.weight"], found[f"{block}.attention.wo.weight"] = (
            (3 * wide, wide),
            (wide, wide),
        )
        found[f"{block}.feed_forward.w1.weight"] = (2 * HIDDEN, wide)
        found[f"{block}.feed_forward.w2.weight"] = (wide, HIDDEN)
    for i, (before, after) in enumerate(itertools.pairwise(CHANNELS)):
        place = f"encoder.patchify.0.net.{i}"
        found |= _pair(f"{place}.block", before, after, (after, before, 3, 3))
        found[f"{place}.shortcut.weight"] = (after, before, 2, 2)
    for i, (before, after) in enumerate(zip(CHANNELS[:0:-1], CHANNELS[-2::-1])):
        place = f"decoder.unpatchify.1.net.{i}"
        found |= _pair(f"{place}.block", before, after, (before, after, 4, 4))
        found |= _pair(f"{place}.block2", after, after, (after, after, 3, 3))
        found[f"{place}.shortcut.weight"] = (before, after, 2, 2)
    critic = {
        "halve_0": (CRITIC, IMAGE), "halve_1": (2 * CRITIC, CRITIC), "widen": (4 * CRITIC, 2 * CRITIC),
        "judge": (1, 4 * CRITIC),
    }  # fmt: skip
    for name, (out, into) in critic.items():
        found |= {f"critic.{name}.weight": (out, into, 4, 4), f"critic.{name}.bias": (out,)}
    for name, width in (("norm_1", 2 * CRITIC), ("norm_widen", 4 * CRITIC)):
        found |= {f"critic.{name}.weight": (width,), f"critic.{name}.bias": (width,)}
    return found


def _pair(place, before, after, first):
    """Two normalised convolutions."""
    return {
        f"{place}.0.weight": (before,), f"{place}.0.bias": (before,), f"{place}.2.weight": first,
        f"{place}.3.weight": (after,), f"{place}.3.bias": (after,), f"{place}.5.weight": (after, after, 3, 3),
    }  # fmt: skip


def weights():
    """float32 by name; norms are near 1."""
    random, found = np.random.default_rng(0), {}
    for name, shape in sorted(shapes().items()):
        values = random.normal(size=shape)
        if len(shape) == 1:
            values = 0.1 * values + name.endswith("weight")
        else:
            values /= math.sqrt(math.prod(shape[1:]))
        found[name] = values.astype(np.float32)
    return found


def batch():
    """Images [N, C, H, W], and the draws of their posteriors: [N, L] and [N, L, LATENT - 1]."""
    random, tokens = np.random.default_rng(1), (SIDE // 2 ** (len(CHANNELS) - 1)) ** 2
    images = np.tanh(random.normal(size=(2, IMAGE, SIDE, SIDE)))
    along = random.beta(3, 2, size=(2, tokens))
    across = random.normal(size=(2, tokens, LATENT - 1))
    return tuple(part.astype(np.float32) for part in (images, along, across))


def main():
    import torch
    import torch.nn.functional as F

    w = {name: torch.tensor(value, requires_grad=True) for name, value in weights().items()}
    images, along, across = map(torch.tensor, batch())

    def norm(x, name, groups):
        return F.group_norm(x, groups, w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-6)

    def active(x, name):
        return F.silu(norm(x, name, min(32, x.shape[1] // 4)))

    def rms(x, name):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]

    def transformer(x, part):
        n, width, side, _ = x.shape
        first = w[f"{part}.register_token.weight"].expand(n, -1, -1)
        x = torch.cat([first, x.flatten(2).transpose(1, 2)], dim=1)
        pairs = width // 2
        frequencies = 10000.0 ** (-torch.arange(0, pairs, 2) / pairs)
        place = torch.arange(side) + 1.5
        column, row = (place.repeat(side), place.repeat_interleave(side))
        angles = torch.cat([column[:, None] * frequencies, row[:, None] * frequencies], dim=1)
        angles = torch.cat([torch.zeros(REGISTERS, pairs), angles])
        turn = torch.polar(torch.ones_like(angles), angles)

        def rotated(x):
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)

        block = f"{part}.layers.0"
        h = rms(x, f"{block}.attention_norm") @ w[f"{block}.attention.wqkv.weight"].T
        q, k, v = h.chunk(3, dim=-1)  # one head of 64
        h = F.scaled_dot_product_attention(rotated(q)[:, None], rotated(k)[:, None], v[:, None])[:, 0]
        x = x + h @ w[f"{block}.attention.wo.weight"].T
        a, b = (rms(x, f"{block}.ffn_norm") @ w[f"{block}.feed_forward.w1.weight"].T).chunk(2, dim=-1)
        x = x + (F.silu(a) * b) @ w[f"{block}.feed_forward.w2.weight"].T
        return x[:, REGISTERS:]

    x = F.conv2d(images, w["encoder.conv_in.weight"], padding=1)
    for i in range(len(CHANNELS) - 1):
        place = f"encoder.patchify.0.net.{i}"
        h = F.conv2d(active(x, f"{place}.block.0"), w[f"{place}.block.2.weight"], stride=2, padding=1)
        h = F.conv2d(active(h, f"{place}.block.3"), w[f"{place}.block.5.weight"], padding=1)
        x = F.conv2d(x, w[f"{place}.shortcut.weight"], stride=2) + h
    x = rms(transformer(x, "encoder"), "encoder.norm") @ w["encoder.output.weight"].T
    moments = x @ w["quant_proj.weight"].T + w["quant_proj.bias"]
    mu, kappa = F.normalize(moments[..., :-1], dim=-1), F.softplus(moments[..., -1]) + 1

    # Divergence from the uniform law, by way of the entropy.
    beta = torch.tensor((LATENT - 1) / 2)
    alpha = kappa + beta
    log_normaliser = -(
        (alpha + beta) * math.log(2) + alpha.lgamma() - (alpha + beta).lgamma() + beta * math.log(math.pi)
    )
    mean_log = math.log(2) + alpha.digamma() - (alpha + beta).digamma()
    entropy = -(log_normaliser + kappa * mean_log)
    area = math.log(2) + LATENT / 2 * math.log(math.pi) - math.lgamma(LATENT / 2)
    kl = (area - entropy).mean()

    first = 2 * along[..., None] - 1
    y = torch.cat([first, torch.sqrt(1 - first**2) * F.normalize(across, dim=-1)], dim=-1)
    away = F.normalize(F.one_hot(torch.tensor(0), LATENT) - mu, dim=-1)
    tokens = math.sqrt(LATENT) * (y - 2 * away * (away * y).sum(-1, keepdim=True))

    side = SIDE // 2 ** (len(CHANNELS) - 1)
    x = (tokens @ w["post_quant_proj.weight"].T).transpose(1, 2).unflatten(2, (side, side))
    x = transformer(F.conv2d(x, w["decoder.conv_in.1.weight"], padding=1), "decoder")
    x = x.transpose(1, 2).unflatten(2, (side, side))
    for i in range(len(CHANNELS) - 1):
        place = f"decoder.unpatchify.1.net.{i}"
        h = active(x, f"{place}.block.0")
        h = F.conv_transpose2d(h, w[f"{place}.block.2.weight"], stride=2, padding=1)
        h = F.conv2d(active(h, f"{place}.block.3"), w[f"{place}.block.5.weight"], padding=1)
        x = F.conv_transpose2d(x, w[f"{place}.shortcut.weight"], stride=2) + h
        h = F.conv2d(active(x, f"{place}.block2.0"), w[f"{place}.block2.2.weight"], padding=1)
        x = x + F.conv2d(active(h, f"{place}.block2.3"), w[f"{place}.block2.5.weight"], padding=1)
    made = F.conv2d(active(x, "decoder.conv_out.0"), w["decoder.conv_out.2.weight"], padding=1)

    def critic(x, w):
        conv = lambda x, name, stride=1: F.conv2d(
            x, w[f"critic.{name}.weight"], w[f"critic.{name}.bias"], stride, 1
        )
        norm = lambda x, name: F.group_norm(
            x, CRITIC // 4, w[f"critic.{name}.weight"], w[f"critic.{name}.bias"], eps=1e-6
        )
        x = F.leaky_relu(conv(x, "halve_0", 2), 0.2)
        x = F.leaky_relu(norm(conv(x, "halve_1", 2), "norm_1"), 0.2)
        return conv(F.leaky_relu(norm(conv(x, "widen"), "norm_widen"), 0.2), "judge")

    error = (made - images).abs().mean()
    fooled = -critic(made, {name: value.detach() for name, value in w.items()}).mean()
    real, fake = critic(images, w), critic(made.detach(), w)
    hinge = 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())
    (error + KL_WEIGHT * kl + CRITIC_WEIGHT * fooled + hinge).backward()
    terms = torch.stack([error, kl, fooled, hinge]).detach().numpy()
    gradients = {name: value.grad.numpy() for name, value in w.items()}
    kept = {f"norm/{name}": np.linalg.norm(g.astype(np.float64)) for name, g in gradients.items()}
    kept |= {f"gradient/{name}": g for name, g in gradients.items() if g.size <= _SMALL}
    np.savez_compressed(FILE, terms=terms, **kept)
    print(dict(zip(("error", "kl", "fooled", "critic"), terms.tolist())))


if __name__ == "__main__":
    main()
