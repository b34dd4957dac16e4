"""MAR's sampling loop in PyTorch, written from its description. Speed and numbers of
this library are compared with it.

It does the same work as the public implementation, in the same order. The encoder runs
on the known tokens only. Every denoising step is one full call of the head, which
includes the embeddings of time and condition and the modulations. Every AR step draws
its noise when it needs it. The modules have the names of the published checkpoints.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cspd_jax.diffusion.schedule import Schedule
from cspd_jax.image.order import mask_lengths
from cspd_jax.networks.mar import MARConfig


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, w = x.shape
        q, k, v = (
            self.qkv(x)
            .reshape(b, n, 3, self.heads, w // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        return self.proj(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, w)
        )


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, ratio: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, int(width * ratio))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width)
        )

    def forward(self, t: Tensor) -> Tensor:
        frequencies = torch.exp(
            -math.log(10_000) * torch.arange(128, device=t.device).float() / 128
        )
        angles = t[:, None].float() * frequencies[None]
        return self.mlp(
            torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1).to(
                self.mlp[0].weight.dtype
            )
        )


class ResBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, dim=-1)
        return x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)


class FinalLayer(nn.Module):
    def __init__(self, width: int, out: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(y).chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class Head(nn.Module):
    def __init__(self, c: MARConfig):
        super().__init__()
        width = c.head_width
        self.time_embed = TimestepEmbedder(width)
        self.cond_embed = nn.Linear(c.decoder_width, width)
        self.input_proj = nn.Linear(c.token_dim, width)
        self.res_blocks = nn.ModuleList(ResBlock(width) for _ in range(c.head_depth))
        self.final_layer = FinalLayer(width, 2 * c.token_dim)

    def forward(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        x = self.input_proj(x)
        y = self.time_embed(t) + self.cond_embed(z)
        for block in self.res_blocks:
            x = block(x, y)
        return self.final_layer(x, y)


class DiffLoss(nn.Module):
    """The head, under the name that it has in the checkpoints, and the sampling
    chain."""

    def __init__(self, c: MARConfig):
        super().__init__()
        self.net = Head(c)

    def sample(
        self,
        z: Tensor,
        s: Schedule,
        noise: Tensor | None,
        temperature: float,
        cfg: float,
    ) -> Tensor:
        """Runs the chains of n tokens and returns x_0 [n, d].

        z: [R, D] the contexts, with R = n; with guidance R = 2 n.
        noise: [T + 1, n, d] the noise of the chains; None draws it here.
        """
        guided = cfg != 1.0
        rows = z.shape[0] // (1 + guided)
        dim = self.net.input_proj.in_features
        x = z.new_empty(rows, dim).normal_() if noise is None else noise[-1]
        for i in reversed(range(s.num_steps)):
            t = torch.full((z.shape[0],), int(s.timestep_map[i]), device=z.device)
            out = self.net(torch.cat([x, x]) if guided else x, t, z)
            eps, v = out.split(dim, dim=-1)
            if guided:
                conditional, unconditional = eps.chunk(2)
                eps = unconditional + cfg * (conditional - unconditional)
                v = v.chunk(2)[0]
            f = (v + 1) / 2
            log_var = f * float(s.log_betas[i]) + (1 - f) * float(
                s.posterior_log_variance_clipped[i]
            )
            x0 = (
                float(s.sqrt_recip_alphas_cumprod[i]) * x
                - float(s.sqrt_recipm1_alphas_cumprod[i]) * eps
            )
            x = (
                float(s.posterior_mean_coef1[i]) * x0
                + float(s.posterior_mean_coef2[i]) * x
            )
            if i > 0:
                step_noise = torch.randn_like(x) if noise is None else noise[i]
                x = x + torch.exp(0.5 * log_var) * step_noise * temperature
        return x


class MAR(nn.Module):
    def __init__(self, c: MARConfig):
        super().__init__()
        self.config = c
        we = c.encoder_width
        wd = c.decoder_width
        total = c.buffer_size + c.seq_len
        self.fake_latent = nn.Parameter(torch.zeros(1, we))
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, total, we))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, wd))
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, total, wd))
        self.diffusion_pos_embed_learned = nn.Parameter(torch.zeros(1, c.seq_len, wd))
        self.class_emb = nn.Embedding(c.num_classes, we)
        self.z_proj = nn.Linear(c.token_dim, we)
        self.z_proj_ln = nn.LayerNorm(we, eps=1e-6)
        self.encoder_blocks = nn.ModuleList(
            Block(we, c.encoder_heads, c.mlp_ratio) for _ in range(c.encoder_depth)
        )
        self.encoder_norm = nn.LayerNorm(we, eps=1e-6)
        self.decoder_embed = nn.Linear(we, wd)
        self.decoder_blocks = nn.ModuleList(
            Block(wd, c.decoder_heads, c.mlp_ratio) for _ in range(c.decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(wd, eps=1e-6)
        self.diffloss = DiffLoss(c)

    def context(self, tokens: Tensor, mask: Tensor, class_embedding: Tensor) -> Tensor:
        """Returns the contexts z [B, L, D] of tokens [B, L, d]. `mask` [B, L] is 1 for
        unknown tokens. All rows must have the same number of known tokens."""
        c = self.config
        batch = tokens.shape[0]
        buffer = c.buffer_size
        x = torch.cat(
            [class_embedding[:, None].expand(-1, buffer, -1), self.z_proj(tokens)],
            dim=1,
        )
        known = torch.cat(
            [mask.new_ones(batch, buffer, dtype=torch.bool), mask < 0.5], dim=1
        )
        x = self.z_proj_ln(x + self.encoder_pos_embed_learned)
        x = x[known].reshape(batch, -1, c.encoder_width)
        for block in self.encoder_blocks:
            x = block(x)
        x = self.decoder_embed(self.encoder_norm(x))
        full = self.mask_token.expand(batch, buffer + c.seq_len, -1).clone()
        full[known] = x.reshape(-1, c.decoder_width)
        x = full + self.decoder_pos_embed_learned
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_norm(x)[:, buffer:] + self.diffusion_pos_embed_learned

    @torch.inference_mode()
    def sample(
        self,
        labels: Tensor,
        schedule: Schedule,
        *,
        num_iter: int,
        orders: np.ndarray,
        noise: np.ndarray,
        cfg: float = 1.0,
        temperature: float = 1.0,
    ) -> Tensor:
        """Makes a batch of images with linear guidance. Returns tokens [B, L, d].

        labels: [B] the class of each image.
        orders: [B, L] the order in which the positions of each image are filled.
        noise: [T + 1, B, L, d] the noise of the chains, by position.
        """
        batch = labels.shape[0]
        length = self.config.seq_len
        halves = 1 + (cfg != 1.0)
        orders = torch.as_tensor(np.ascontiguousarray(orders))
        tokens = torch.zeros(batch, length, self.config.token_dim)
        mask = torch.ones(batch, length)
        embedding = torch.cat(
            [self.class_emb(labels), self.fake_latent.expand(batch, -1)]
        )[: halves * batch]
        for step, masked in enumerate(mask_lengths(length, num_iter)):
            z = self.context(
                tokens.repeat(halves, 1, 1), mask.repeat(halves, 1), embedding
            )
            after = torch.zeros_like(mask).scatter(1, orders[:, :masked], 1.0)
            predicted = (
                mask > 0.5 if step == num_iter - 1 else (mask > 0.5) & (after < 0.5)
            )
            mask = after
            z = z[predicted.repeat(halves, 1)]
            scale = 1 + (cfg - 1) * (length - masked) / length
            if len(z):
                here = torch.as_tensor(noise)[:, predicted]
                tokens[predicted] = self.diffloss.sample(
                    z, schedule, here, temperature, scale
                )
        return tokens


def random_model(config: MARConfig, seed: int = 0) -> MAR:
    """Returns a model with small random parameters, whose samples have no meaning but
    stay finite."""
    torch.manual_seed(seed)
    model = MAR(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("weight") and p.ndim == 1:
                p.copy_(1 + 0.1 * torch.randn_like(p))
            else:
                p.normal_(0.0, 0.5 / math.sqrt(p.shape[-1]) if p.ndim == 2 else 0.02)
    return model
