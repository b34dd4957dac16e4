"""The interface of a model for the image samplers. Any object with these functions will
do."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
from chex import ArrayTree

from cspd_jax.diffusion.chain import Denoiser

Array = jax.Array


class TokenModel(Denoiser, Protocol):
    """The interface of a network: pure functions of explicit parameters. The object is
    hashable, so that it can be a static argument.

    All tokens are in reveal order. `order` [B, L] holds the position of each token,
    and the first `n_known` tokens are known.

    seq_len: L, the number of tokens of an image.
    token_dim: d, the number of coordinates of a token.
    """

    @property
    def seq_len(self) -> int: ...

    @property
    def token_dim(self) -> int: ...

    def embed_class(
        self, params: ArrayTree, labels: Array, unconditional: Array
    ) -> Array:
        """Returns the embeddings [B, De] of the labels [B]. A row for which
        `unconditional` [B] is set has the embedding of "no class"."""
        ...

    def context(
        self,
        params: ArrayTree,
        tokens: Array,
        order: Array,
        n_known: Array,
        class_embedding: Array,
        rows: Array,
        *,
        bucket: int,
    ) -> Array:
        """Returns the contexts z [B, Q, D] of the tokens at the indices `rows` [B, Q]
        in reveal order, given the known tokens.

        tokens: [B, L, d] the tokens. The values of unknown tokens must not matter.
        order: [B, L] the position of each token.
        n_known: [B] the number of known tokens.
        class_embedding: [B, De] the result of `embed_class`.
        rows: [B, Q] the indices of the wanted tokens.
        bucket: a static bound on n_known.
        """
        ...


@runtime_checkable
class CausalTokenModel(Protocol):
    """The additional interface of a causal model, whose tokens come in one order only:
    row by row.

    linear_guidance: the schedule that the model means by "linear" (`image.order`).
    """

    @property
    def linear_guidance(self) -> str: ...

    def finish(self, x: Array) -> Array:
        """Turns the last states of chains, x [..., d], into tokens, which the model
        reads and the autoencoder decodes. A token may be the direction of x, for
        example."""
        ...


@runtime_checkable
class CachedTokenModel(Protocol):
    """The additional interface of a model that has a cache of its context. The sampler
    carries the cache from one AR step to the next.

    Every entry of the cache belongs to an index in reveal order. Entries at n_known or
    later are never read. So calling `extend` with a smaller n_known rolls the cache
    back, and nothing has to be undone.
    """

    def init_cache(
        self, params: ArrayTree, order: Array, class_embedding: Array
    ) -> ArrayTree:
        """Returns an empty cache, which may be any pytree.

        order: [B, L] the position of each token.
        class_embedding: [B, De] the result of `embed_class`.
        """
        ...

    def extend(
        self,
        params: ArrayTree,
        cache: ArrayTree,
        tokens: Array,
        order: Array,
        n_known: Array,
        class_embedding: Array,
        rows: Array,
        *,
        bucket: int,
    ) -> tuple[Array, ArrayTree]:
        """Returns the same contexts as `TokenModel.context`, and the cache with the
        entries of all known tokens."""
        ...
