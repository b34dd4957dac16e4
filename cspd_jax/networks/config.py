"""What the configurations of several image networks have in common. A configuration
stands beside its network: a frozen (hashable) dataclass, the static argument of jitted
calls."""

from __future__ import annotations

import math

from cspd_jax.check import UserError
from cspd_jax.diffusion.flow import is_flow
from cspd_jax.diffusion.schedule import sampling_schedule


class SquareGrid:
    """What models have in common whose images are square grids of tokens."""

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
        """Tokens along one side of the image."""
        return math.isqrt(self.seq_len)

    @property
    def latent_channels(self) -> int:
        return self.token_dim // self.patch_size**2

    @property
    def image_size(self) -> int:
        """Pixels along one side of the image."""
        return self.grid * self.patch_size * self.vae_stride


def check_respacing(respacing: str, flow: bool) -> None:
    """Raises a UserError unless a head of velocities (`flow`), or one of noise, can
    denoise by it."""
    sampling_schedule(respacing)  # refuses what is no schedule
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
