"""What decoding needs of a language model: a few fields of its config, and a pass with a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax

from cspd_jax.errors import UserError

if TYPE_CHECKING:
    from cspd_jax.weights.models import TextModel

Array = jax.Array
Model: TypeAlias = "TextModel | tuple[Any, Any]"  # a loaded model, or a pair (network, params)


class LanguageModelConfig(Protocol):
    """The sizes that decoding reads."""

    @property
    def causal(self) -> bool:
        """Whether a token sees only the tokens before it."""

    @property
    def vocab_size(self) -> int:
        """The size of the last axis of the logits."""

    @property
    def known_ids(self) -> int:
        """Ids from this one on are padding of the vocabulary and are never drawn."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""


class LanguageModel(Protocol):
    """Pure functions of explicit parameters. Implementations are hashable: they are static under jit."""

    @property
    def config(self) -> LanguageModelConfig: ...

    def empty_cache(self, batch: int, max_len: int) -> Any:
        """A cache (any pytree) with one slot for each of max_len positions of each row."""

    def apply(
        self, params: Any, tokens: Array, positions: Array, cache: Any, *, rows: Array | None = None
    ) -> tuple[Array, Any]:
        """Logits [B, Q, V] of tokens [B, Q] at positions [B, Q], and the cache with these tokens stored.

        A token sees the slots at positions up to its own. Positions outside 0..max_len - 1 are padding and
        store nothing. Going back is just reusing earlier positions. rows [B, R] are indices into Q: only
        their logits are computed, [B, R, V].
        """


class TellingLanguageModel(LanguageModel, Protocol):
    """What drafters that read the target's states need besides."""

    def apply(  # type: ignore[override]
        self,
        params: Any,
        tokens: Array,
        positions: Array,
        cache: Any,
        *,
        rows: Array | None = None,
        entering: tuple[int, ...],
    ) -> tuple[Array, Any, Array]:
        """As that of a `LanguageModel`, and what enters the layers `entering` at all tokens, side by side:
        [B, Q, S D]. So do `apply_packed` and `apply_seeing`, where a model has them."""


class PackingLanguageModel(LanguageModel, Protocol):
    """What passes without padding need besides. A model that does not have it computes the padding, too.

    packs: whether a pass over many tokens takes longer than one over few, as it does on a CPU.
    """

    packs: bool

    def apply_packed(
        self,
        params: Any,
        tokens: Array,
        positions: Array,
        cache: Any,
        *,
        size: int,
        read: Callable[[Array], Array],
    ) -> tuple[Array, Any]:
        """As `apply`, but read(logits) [B, Q, ...] in place of the logits, and zeros of what is padding.

        At most `size` tokens are not padding. read: from logits [1, size, V] to [1, size, ...].
        """


class TreeLanguageModel(LanguageModel, Protocol):
    """What trees of drafts need besides: tokens that share a position, and a cache whose slots can be moved.

    The caches have a field max_len, the number of their slots.
    """

    def apply_seeing(
        self, params: Any, tokens: Array, positions: Array, cache: Any, *, slots: Array, visible: Array
    ) -> tuple[Array, Any]:
        """As `apply`, with the tokens stored in `slots` [B, Q]; each sees the slots of visible
        [B, Q, max_len] (bool)."""

    def move(self, cache: Any, sources: Array, targets: Array) -> Any:
        """Returns the cache with the contents of the slots `sources` [B, M] in `targets` [B, M] as well.

        Targets outside 0..max_len - 1 are dropped.
        """


def bound(model: Model) -> tuple[Any, Any]:
    """(network, params) of a loaded model as decoding wants them, or of such a pair as it is.

    Use the pair inside your own jitted function, where the parameters are traced.
    """
    network, params = getattr(model, "network", None), getattr(model, "params", None)
    if isinstance(model, tuple) and len(model) == 2:
        network, params = model
    elif network is None or not hasattr(model, "params"):
        raise UserError(
            f"a model must be a TextModel or a pair (network, params), not {type(model).__name__}"
        )
    if hasattr(network, "network"):  # a loaded model within the pair
        raise UserError("a pair begins with a network; give the model, or (model.network, model.params)")
    if not hasattr(getattr(network, "config", None), "causal"):
        raise UserError(f"the network of a model must be a language model's, not a {type(network).__name__}")
    return getattr(model, "for_decoding", (network, params))
