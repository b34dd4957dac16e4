"""SphereAR's sampling loop in PyTorch, written from its description, to compare speed with.

As published: a key-value cache, one token at a time, and every step of the flow one full call of the head
(time embedding, condition embedding and modulations included).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cspd_jax.networks.config import SphereConfig
from cspd_jax.networks.sphere_layers import rotary_2d, swiglu_width


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool):
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, 2 * hidden, bias), nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(a) * b)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = RMSNorm(width), RMSNorm(width)
        self.wqkv, self.wo = nn.Linear(width, 3 * width, False), nn.Linear(width, width, False)
        self.feed_forward = SwiGLU(width, swiglu_width(width), False)

    def forward(self, x: Tensor, turn: Tensor, slots: tuple[Tensor, Tensor], at: int) -> Tensor:
        """x [B, 1, D] at place `at` of the cache."""
        b, n, w = x.shape
        q, k, v = self.wqkv(self.attention_norm(x)).reshape(b, n, 3, self.heads, -1).unbind(2)
        q, k = (
            torch.view_as_real(torch.view_as_complex(a.unflatten(-1, (-1, 2))) * turn).flatten(-2)
            for a in (q, k)
        )
        keys, values = slots
        keys[:, :, at], values[:, :, at] = k[:, 0], v[:, 0]
        seen = keys[:, :, : at + 1], values[:, :, : at + 1]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), *seen)
        x = x + self.wo(out.transpose(1, 2).reshape(b, n, w))
        return x + self.feed_forward(self.ffn_norm(x))


class HeadBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width, 1e-6), SwiGLU(width, int(1.5 * width), True)

    def forward(self, h: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Tensor:
        return h + gate * self.mlp(self.norm(h) * (1 + scale) + shift)


class Head(nn.Module):
    def __init__(self, c: SphereConfig):
        super().__init__()
        width = c.head_width
        self.together = c.head_depth // c.head_modulations
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.cond, self.proj = nn.Linear(c.width, width), nn.Linear(c.token_dim, width)
        self.blocks = nn.ModuleList(HeadBlock(width) for _ in range(c.head_depth))
        self.modulations = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(c.head_modulations))
        self.last, self.out = nn.Linear(width, 2 * width), nn.Linear(width, c.token_dim)

    def forward(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10_000) * torch.arange(128) / 128)
        angles = 1000 * t[:, None] * frequencies
        y = F.silu(self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.cond(z))
        h = self.proj(x)
        for i, block in enumerate(self.blocks):
            if i % self.together == 0:
                modulation = self.modulations[i // self.together](y).chunk(3, dim=-1)
            h = block(h, *modulation)
        scale, shift = self.last(y).chunk(2, dim=-1)
        return self.out(F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift)


class Model(nn.Module):
    def __init__(self, c: SphereConfig):
        super().__init__()
        self.config = c
        self.proj_in, self.emb_norm, self.norm = (
            nn.Linear(c.token_dim, c.width),
            RMSNorm(c.width),
            RMSNorm(c.width),
        )
        self.layers = nn.ModuleList(Block(c.width, c.heads) for _ in range(c.depth))
        self.head = Head(c)
        cos, sin = (torch.tensor(a) for a in rotary_2d(c.grid, c.width // c.heads, c.class_tokens))
        self.turns = torch.complex(cos, sin)

    def cache(self, batch: int) -> list[tuple[Tensor, Tensor]]:
        c = self.config
        shape = (batch, c.heads, c.class_tokens + c.seq_len, c.width // c.heads)
        return [(torch.zeros(shape), torch.zeros(shape)) for _ in range(c.depth)]

    def context(self, token: Tensor, cache: list[tuple[Tensor, Tensor]], at: int) -> Tensor:
        """token [B, C] at place `at` -> z [B, D]."""
        x = self.emb_norm(self.proj_in(token))[:, None]
        for layer, slots in zip(self.layers, cache):
            x = layer(x, self.turns[at], slots, at)
        return self.norm(x)[:, 0]

    def token(self, z: Tensor, steps: int) -> Tensor:
        x, dt, t = torch.randn(len(z), self.config.token_dim), 0.96 / steps, torch.zeros(len(z))
        for _ in range(steps):
            now = t[:, None]
            drift = (1 + now) * self.head(x, t, z) - x
            x = x + drift * dt + torch.sqrt(2 * (1 - now) * dt) * torch.randn_like(x)
            t = t + dt
        x = x + 0.04 * self.head(x, torch.full_like(t, 0.96), z)
        return math.sqrt(x.shape[-1]) * F.normalize(x, dim=-1)
