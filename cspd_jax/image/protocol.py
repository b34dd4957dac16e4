"""What an image decoder asks of a model. Any object with these functions will do."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from cspd_jax.diffusion.chain import Denoiser

Array = jax.Array


class TokenModel(Denoiser, Protocol):
    """Pure functions of explicit parameters; hashable, so that it can be a static argument.

    Tokens are in reveal order throughout: `reveal` [B, L] holds positions, the first `n_known` are known.
    """

    seq_len: int
    token_dim: int

    def embed_class(self, params: Any, labels: Array, unconditional: Array) -> Array:
        """labels [B]; where `unconditional` [B] is set, the embedding of "no class". -> [B, De]"""

    def context(
        self,
        params: Any,
        tokens: Array,
        reveal: Array,
        n_known: Array,
        class_embedding: Array,
        rows: Array,
        *,
        bucket: int,
    ) -> Array:
        """tokens [B, L, d], n_known [B] -> z [B, Q, D] at the indices `rows` [B, Q] of the reveal order.

        Values of unknown tokens must not matter. `bucket` is a static bound on n_known.
        """
