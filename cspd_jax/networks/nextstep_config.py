"""Sizes of NextStep-1, as a frozen (hashable) dataclass."""

from __future__ import annotations

import dataclasses

from cspd_jax._utils import limits
from cspd_jax.errors import UserError, check_whole
from cspd_jax.networks.config import check_respacing
from cspd_jax.networks.lm_config import LMConfig


@dataclasses.dataclass(frozen=True)
class NextStepConfig:
    """A NextStep-1 model: a language model over text and the tokens of an image, and a flow head.

    lm: the language model.
    token_dim: numbers per token, channels * patch_size^2.
    head_depth, head_width: of the flow head.
    rows, columns: tokens along the height and along the width of an image.
    prompts: how many prompts are bound to the model, as its classes; in a checkpoint there are none.
    positions: a table of places is added to what the head is given.
    position_side: tokens along a side of that table.
    normalise: tokens are normalised where their chains end.
    image_ids: the id after which an image begins.
    respacing: the steps of sampling, see `diffusion.flow`.
    patch_size: latents along one side of a token.
    vae_stride: pixels per latent.
    """

    lm: LMConfig
    token_dim: int = 64
    head_depth: int = 12
    head_width: int = 1536
    rows: int = 32
    columns: int = 32
    prompts: int = 0
    positions: bool = False
    position_side: int = 32
    normalise: bool = False
    image_ids: tuple[int, ...] = ()
    respacing: str = "flow-calls20"
    patch_size: int = 2
    vae_stride: int = 8

    def __post_init__(self):
        for name, least, most in (
            ("token_dim", 1, limits.WIDTH),
            ("head_depth", 1, limits.LAYERS),
            ("head_width", 1, limits.WIDTH),
            ("rows", 1, limits.PATCH),
            ("columns", 1, limits.PATCH),
            ("prompts", 0, limits.IDS),
            ("position_side", 1, limits.PATCH),
            ("patch_size", 1, limits.PATCH),
            ("vae_stride", 1, limits.PATCH),
        ):
            check_whole(f"the model's {name}", getattr(self, name), least, most)
        check_respacing(self.respacing, flow=True)
        if not self.lm.causal:
            raise UserError("the model's language model is a masked-diffusion model; it must be causal")
        if self.token_dim % self.patch_size**2:
            raise UserError(
                f"token dimension {self.token_dim} is not a multiple of patch_size^2 = {self.patch_size**2}"
            )
        if len(self.image_ids) > 1 or any(not 0 <= i < self.lm.vocab_size for i in self.image_ids):
            raise UserError(f"the model's image_ids are {self.image_ids}; they may hold one of its ids")
        if self.positions and self.lm.width % 4:
            raise UserError(f"width {self.lm.width} has no table of places: it is not a multiple of 4")
        if self.positions and self.seq_len > self.position_side**2:
            raise UserError(
                f"an image of {self.rows} x {self.columns} tokens is larger than the model's table of"
                f" {self.position_side}^2 places"
            )

    @property
    def blocks(self) -> int:
        """Of all parts; each has parameters."""
        return self.lm.depth + self.head_depth

    @property
    def seq_len(self) -> int:
        return self.rows * self.columns

    @property
    def num_classes(self) -> int:
        """An image's class is its prompt."""
        return self.prompts

    @property
    def kv_heads(self) -> int:
        return self.lm.kv_heads

    @property
    def context_width(self) -> int:
        """Numbers in each z."""
        return self.lm.width

    @property
    def latent_channels(self) -> int:
        return self.token_dim // self.patch_size**2

    @property
    def latent_scale(self) -> float:
        """Tokens are latents times this; what else the autoencoder's own file says is left to it."""
        return 1.0

    @property
    def image_size(self) -> int:
        """Pixels along the longer side of the image."""
        return max(self.rows, self.columns) * self.patch_size * self.vae_stride
