"""What decoding needs of a masked-diffusion language model: passes over everything, and beside a cache."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from cspd_jax.text.protocol import LanguageModelConfig

Array = jax.Array


class MaskedModelConfig(LanguageModelConfig, Protocol):
    """The sizes and conventions that decoding reads."""

    @property
    def mask_ids(self) -> tuple[int, ...]:
        """The id that stands for a place to be filled, as a tuple of one."""

    @property
    def shifted(self) -> bool:
        """Whether hidden state i - 1 predicts the token at position i, as in Dream."""


class MaskedLanguageModel(Protocol):
    """Pure functions of explicit parameters. Implementations are hashable: they are static under jit."""

    @property
    def config(self) -> MaskedModelConfig: ...

    def forward(
        self, params: Any, tokens: Array, mask: Array | None = None, *, rows: Array | None = None
    ) -> Array:
        """Logits [B, N, V] of tokens [B, N] without a cache; at index i they predict the token at i.

        mask [B, N] hides tokens where it is false. rows [B, R] are indices into N: logits [B, R, V] of these.
        """

    def empty_cache(self, batch: int, max_len: int) -> Any:
        """A cache (any pytree) with one slot for each of max_len positions of each row."""

    def apply(
        self,
        params: Any,
        tokens: Array,
        positions: Array,
        cache: Any,
        *,
        mask: Array | None = None,
        rows: Array | None = None,
    ) -> tuple[Array, Any]:
        """Logits [B, Q, V] of tokens [B, Q], and the cache with them stored at positions [B, Q].

        Positions outside the cache store nothing. mask [B, max_len] hides slots. The logits are those of the
        hidden states, also of a shifted model.
        """

    def beside(
        self, params: Any, tokens: Array, positions: Array, cache: Any, *, own: Array, mask: Array
    ) -> Array:
        """Logits [B, R, Q, V] of R versions [B, R, Q] of the tokens at positions [B, Q]; nothing is stored.

        A token sees its own version's tokens where own [B, Q] is true, and the slots of mask [B, max_len].
        """
