"""What decoding needs of a language model, causal or masked, and the prompts that it is
given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import chex
import jax
import numpy as np
from chex import ArrayTree
from jax.typing import ArrayLike

from cspd_jax.check import UserError
from cspd_jax.models import TextModel
from cspd_jax.networks.lm import Pass

Array = jax.Array
# A loaded model, or a pair (network, params).
Model: TypeAlias = TextModel | tuple[Any, ArrayTree]


class LanguageModelConfig(Protocol):
    """The sizes that decoding reads.

    causal: whether a token sees only the tokens before it.
    vocab_size: the size of the last axis of the logits.
    known_ids: the first id that is padding of the vocabulary: it and those after it are
        never drawn.
    eos_ids: the ids that end a text.
    """

    causal: bool
    vocab_size: int
    known_ids: int
    eos_ids: tuple[int, ...]


class LanguageModel(Protocol):
    """Pure functions of explicit parameters. Implementations are hashable: they are
    static under jit.

    A model that has more is used better. If `packs` is true, a pass over many tokens
    takes longer than one over few, as it does on a CPU, and `apply_packed` skips the
    padding: `PackingLanguageModel`.
    """

    @property
    def config(self) -> LanguageModelConfig: ...

    def empty_cache(self, batch: int, max_len: int) -> ArrayTree:
        """Makes a cache (any pytree) with one slot for each of max_len positions of
        each row."""

    def apply(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: ArrayTree,
        *,
        rows: Array | None = None,
        entering: tuple[int, ...] = (),
    ) -> Pass:
        """Returns logits [B, Q, V] of tokens [B, Q] at positions [B, Q], and the cache
        with these stored.

        A token sees the slots at positions up to its own. Positions outside 0..max_len
        - 1 are padding and store nothing. Going back is just reusing earlier positions.
        rows [B, R] are indices into Q: only their logits are computed, [B, R, V].
        entering: layers; what enters them at all tokens is returned too, and heads
        draft from it. Without any, the states are None.
        """


class PackingLanguageModel(LanguageModel, Protocol):
    """What passes without padding need of a model as well."""

    packs: bool

    def apply_packed(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: ArrayTree,
        *,
        size: int,
        read: Callable[[Array], Array],
        entering: tuple[int, ...] = (),
    ) -> Pass:
        """Does what `apply` does, with read(logits) [B, Q, ...] in place of the logits,
        and zeros of padding.

        At most `size` tokens are not padding. read: from logits [1, size, V] to [1,
        size, ...].
        """


class TreeLanguageModel(LanguageModel, Protocol):
    """What trees of drafts need of a model as well: tokens that share a position, and a
    cache whose slots can be moved.

    The caches have a field max_len, the number of their slots.
    """

    def apply_seeing(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: ArrayTree,
        *,
        slots: Array,
        visible: Array,
        entering: tuple[int, ...] = (),
    ) -> Pass:
        """Does what `apply` does, with the tokens stored in `slots` [B, Q]; each sees
        the slots of visible [B, Q, max_len] (bool)."""

    def move(self, cache: ArrayTree, sources: Array, targets: Array) -> ArrayTree:
        """Returns the cache with the contents of the slots `sources` [B, M] in
        `targets` [B, M] as well.

        Targets outside 0..max_len - 1 are dropped.
        """


class MaskedModelConfig(LanguageModelConfig, Protocol):
    """The conventions of a masked-diffusion model.

    mask_ids: the id that stands for a place to be filled, as a tuple of one.
    shifted: whether hidden state i - 1 predicts the token at position i, as in Dream.
    """

    mask_ids: tuple[int, ...]
    shifted: bool


class MaskedLanguageModel(Protocol):
    """Passes over everything, and beside a cache: pure functions, of a hashable
    object."""

    @property
    def config(self) -> MaskedModelConfig: ...

    def forward(
        self,
        params: ArrayTree,
        tokens: Array,
        mask: Array | None = None,
        *,
        rows: Array | None = None,
    ) -> Array:
        """Returns logits [B, N, V] of tokens [B, N] without a cache; at i they predict
        the token at i.

        mask [B, N] hides tokens where it is false. rows [B, R] are indices into N:
        logits [B, R, V] of these.
        """

    def empty_cache(self, batch: int, max_len: int) -> ArrayTree:
        """Makes a cache (any pytree) with one slot for each of max_len positions of
        each row."""

    def apply(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: ArrayTree,
        *,
        mask: Array | None = None,
        rows: Array | None = None,
    ) -> Pass:
        """Returns logits [B, Q, V] of tokens [B, Q], and the cache with them stored at
        positions [B, Q].

        Positions outside the cache store nothing. mask [B, max_len] hides slots. The
        logits are those of the hidden states, also of a shifted model.
        """

    def beside(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: ArrayTree,
        *,
        own: Array,
        mask: Array,
    ) -> Array:
        """Returns logits [B, R, Q, V] of R versions [B, R, Q] of the tokens at
        positions [B, Q]; nothing is stored.

        A token sees its own version's tokens where own [B, Q] is true, and the slots of
        mask [B, max_len].
        """


def bound(model: Model) -> tuple[Any, ArrayTree]:
    """Returns (network, params) of a loaded model as decoding wants them, or such a
    pair as it is.

    Use the pair inside your own jitted function, where the parameters are traced.
    """
    return model if isinstance(model, tuple) else model.for_decoding


class Prompts(NamedTuple):
    """Prompts of different lengths as arrays, which may be traced under jit.

    tokens: [B, P] ids, each prompt at the left edge; what follows it in its row is
        ignored.
    lengths: [B] number of tokens in each prompt.
    """

    tokens: Any
    lengths: Any


PromptsLike = Prompts | tuple[Array, Array] | Sequence[Sequence[int]]


def pad_prompts(prompts: Sequence[Sequence[int] | np.ndarray]) -> Prompts:
    """Makes arrays of lists of ids, padded with zeros on the right."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(lengths), max(lengths, default=0)), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    return Prompts(tokens, lengths)


def as_prompts(prompts: PromptsLike) -> Prompts:
    """Pads a list of prompts; takes a tuple to be (tokens, lengths) already."""
    found = Prompts(*prompts) if isinstance(prompts, tuple) else pad_prompts(prompts)
    chex.assert_shape(found.tokens, (len(found.lengths), None))
    return found


def concrete(value: ArrayLike | None) -> np.ndarray | None:
    """Returns the value as a numpy array; None if there is none or it is traced."""
    return (
        None
        if value is None or isinstance(value, jax.core.Tracer)
        else np.asarray(value)
    )


def check_prompts(
    config: LanguageModelConfig, prompts: Prompts, new: int, shortest: int = 1
) -> None:
    """Raises a UserError unless no prompt is empty, and the model has its ids and
    places for `new` more."""
    tokens = concrete(prompts.tokens)
    lengths = concrete(prompts.lengths)
    longest = np.shape(prompts.tokens)[1]
    most = getattr(config, "max_positions", longest + new)
    if longest + new > most:
        raise UserError(
            f"a prompt of {longest} tokens and {new} new ones are more than the {most}"
            " positions that the model was made for; shorten the prompt, or ask for"
            " fewer new tokens (--new-tokens)"
        )
    if lengths is not None and (not len(lengths) or lengths.min() < shortest):
        raise UserError(
            f"a prompt is empty; it needs at least {shortest} token to begin with"
        )
    if tokens is not None and lengths is not None:
        ids = tokens[np.arange(longest) < lengths[:, None]]
        for wrong in ids[(ids < 0) | (ids >= config.known_ids)]:
            raise UserError(
                f"id {wrong} in a prompt is not one of the model's {config.known_ids}"
                " ids"
            )
        for mask in np.intersect1d(ids, getattr(config, "mask_ids", ())):
            raise UserError(
                f"id {mask} in a prompt is the mask's; places to be filled come after"
                " the prompt"
            )
