"""The common parts of the configurations of image networks. A configuration stands
beside its network. It is a frozen, hashable dataclass, and a static argument of jitted
calls."""

from __future__ import annotations

import math

from cspd_jax.check import UserError
from cspd_jax.diffusion.flow import is_flow
from cspd_jax.diffusion.schedule import sampling_schedule


class SquareGrid:
    """The common part of models whose images are square grids of tokens."""

    seq_len: int
    token_dim: int
    patch_size: int
    vae_stride: int

    def check_grid(self) -> None:
        if math.isqrt(self.seq_len) ** 2 != self.seq_len:
            raise UserError(
                f"the number of tokens, {self.seq_len}, is not a square, and images are"
            )

    @property
    def grid(self) -> int:
        """The number of tokens along one side of the image."""
        return math.isqrt(self.seq_len)

    @property
    def latent_channels(self) -> int:
        return self.token_dim // self.patch_size**2

    @property
    def image_size(self) -> int:
        """The number of pixels along one side of the image."""
        return self.grid * self.patch_size * self.vae_stride


def check_respacing(respacing: str, flow: bool) -> None:
    """Raises a UserError unless a head can denoise by these steps.

    flow: whether the head predicts velocities; otherwise it predicts noise.
    """
    sampling_schedule(respacing)  # raises an error if it is no schedule
    if is_flow(respacing) != flow:
        kind, own = (
            ("a flow head", "flow100")
            if flow
            else ("a head that predicts noise", "100 or ddim50")
        )
        raise UserError(
            f"the steps are {respacing!r}, and the model has {kind}, with steps such as"
            f" {own}"
        )
