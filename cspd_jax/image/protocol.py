"""What the image samplers ask of a model. Any object with these functions will do."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax

from cspd_jax.diffusion.chain import Denoiser

Array = jax.Array


class TokenModel(Denoiser, Protocol):
    """Pure functions of explicit parameters; hashable, so that it can be a static
    argument.

    Tokens are in reveal order throughout: `reveal` [B, L] holds positions, the first
    `n_known` are known.

    seq_len: L, tokens per image.
    token_dim: d, numbers per token.
    """

    @property
    def seq_len(self) -> int: ...

    @property
    def token_dim(self) -> int: ...

    def embed_class(self, params: Any, labels: Array, unconditional: Array) -> Array:
        """Embeds labels [B]; where `unconditional` [B] is set, the embedding of "no
        class". -> [B, De]"""
        ...

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
        """Reads tokens [B, L, d], of which n_known [B] are known, and returns z [B, Q,
        D] at the indices `rows` [B, Q] of the reveal order.

        Values of unknown tokens must not matter. `bucket` is a static bound on n_known.
        """
        ...


@runtime_checkable
class CausalTokenModel(Protocol):
    """What a model has in addition that is made for one order of the tokens, row by
    row.

    linear_guidance: what the schedule "linear" is called for it (`image.order`).
    """

    @property
    def linear_guidance(self) -> str: ...

    def finish(self, x: Array) -> Array:
        """Turns the end of a chain [..., d] into the token: what is fed back and
        decoded, such as its direction."""
        ...


@runtime_checkable
class CachedTokenModel(Protocol):
    """What a causal model may have in addition: a cache of its context, carried by the
    sampler.

    Every entry belongs to an index of the reveal order, and entries at n_known or later
    are never read. So rolling back is calling `extend` with a smaller n_known, and
    nothing has to be undone.
    """

    def init_cache(self, params: Any, reveal: Array, class_embedding: Array) -> Any:
        """Returns a cache of nothing, for reveal [B, L] and class_embedding [B, De]:
        any pytree."""
        ...

    def extend(
        self,
        params: Any,
        cache: Any,
        tokens: Array,
        reveal: Array,
        n_known: Array,
        class_embedding: Array,
        rows: Array,
        *,
        bucket: int,
    ) -> tuple[Array, Any]:
        """Does what `TokenModel.context` does, and returns the cache with the entries
        that it was missing."""
        ...
