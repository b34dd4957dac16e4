"""The functions that decoding needs from a language model, causal or masked, and the
prompts that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import chex
import jax
import numpy as np
from chex import ArrayTree
from jax.typing import ArrayLike

from cspd_jax.check import UserError
from cspd_jax.models import TextModel, check_model
from cspd_jax.networks.lm import Pass

Array = jax.Array
# A loaded model, or a pair (network, params).
Model: TypeAlias = TextModel | tuple[Any, ArrayTree]


class LanguageModelConfig(Protocol):
    """The sizes that decoding reads.

    causal: whether a token sees only itself and the tokens before it.
    vocab_size: the size of the last axis of the logits.
    known_ids: the number of ids that may be drawn. Ids from this number on only pad the
        vocabulary.
    eos_ids: the ids that end a text.
    """

    causal: bool
    vocab_size: int
    known_ids: int
    eos_ids: tuple[int, ...]


class LanguageModel(Protocol):
    """A language model: pure functions of explicit parameters. Implementations are
    hashable, because they are static under jit.

    A model may have more functions than these. If it has a true attribute `packs`, a
    pass over many tokens takes longer than a pass over few, as on a CPU, and decoding
    calls `apply_packed`, which skips the padding: see `PackingLanguageModel`.
    """

    @property
    def config(self) -> LanguageModelConfig: ...

    def empty_cache(self, batch: int, max_len: int) -> ArrayTree:
        """Makes a cache, which may be any pytree. Each row has one slot for each of
        max_len positions."""

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
        """Reads tokens, and returns their logits [B, Q, V] and the cache with the
        tokens stored in it.

        A token sees the slots at positions up to its own. To go back, call the function
        with earlier positions again.

        tokens: [B, Q] ids.
        positions: [B, Q] the position of each token. Tokens at positions outside
            0..max_len - 1 are padding and are not stored.
        rows: [B, R] indices into Q. If they are given, only their logits are computed,
            [B, R, V].
        entering: S layers. The hidden states that enter these layers are returned for
            all tokens, [B, Q, S D], and heads draft from them. Without layers the
            states are None.

        For example, a row with 3 stored tokens and a max_len of 8 reads 2 new tokens
        and a padding at the positions 3, 4 and 8.
        """


class PackingLanguageModel(LanguageModel, Protocol):
    """The additional functions of a model that can skip padding.

    packs: whether skipping padding saves time.
    """

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
        """Does what `apply` does, and returns read(logits) [B, Q, ...] in place of the
        logits. The results for padding are zeros.

        size: a bound on the number of tokens that are not padding.
        read: maps logits [1, size, V] to [1, size, ...].
        """


class TreeLanguageModel(LanguageModel, Protocol):
    """The additional functions of a model that can verify a tree of drafts: tokens may
    share a position, and the slots of the cache can be moved.

    A cache has a field max_len, the number of its slots.
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
        """Does what `apply` does, with given slots and a given visibility.

        slots: [B, Q] the slots that store the tokens.
        visible: [B, Q, max_len] bool, which slots each token sees.
        """

    def move(self, cache: ArrayTree, sources: Array, targets: Array) -> ArrayTree:
        """Returns the cache with the contents of the slots `sources` copied to the
        slots `targets`.

        sources: [B, M] the slots that are copied.
        targets: [B, M] the slots that are overwritten. Targets outside 0..max_len - 1
            are dropped.
        """


class MaskedModelConfig(LanguageModelConfig, Protocol):
    """The conventions of a masked-diffusion model.

    mask_ids: the id that stands for a place to be filled, as a tuple of one id.
    block: the number of tokens in a block, if a token sees only its own block and the
        blocks before it; 0 if it sees the whole text.
    shifted: whether the hidden state i - 1 predicts the token at position i, as in
        Dream.
    """

    mask_ids: tuple[int, ...]
    block: int
    shifted: bool


class MaskedLanguageModel(LanguageModel, Protocol):
    """A masked-diffusion language model: pure functions of explicit parameters.
    Implementations are hashable. A model that sees the whole text needs `forward`
    alone. A model that is causal between blocks needs the other functions, too, and in
    `apply` its tokens see the slots up to the end of their own block."""

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
        """Returns the logits [B, N, V] of whole rows, without a cache. The logits at i
        predict the token at i.

        tokens: [B, N] ids.
        mask: [B, N] bool, false hides a token.
        rows: [B, R] indices into N. If they are given, the logits are those at the
            indices, [B, R, V].
        """

    def beside(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: ArrayTree,
        *,
        seen: Array,
    ) -> tuple[Array, ArrayTree]:
        """Reads R versions of the tokens at the same positions. Returns their logits
        [B, R, Q, V], and what `store` needs to store them. The logits at i come from
        the hidden state i, even if the model is shifted.

        tokens: [B, R, Q] the ids of each version.
        positions: [B, Q] the position of each token; max_len for padding.
        seen: [B, max_len] bool, which slots of the cache a token sees.
        """

    def store(
        self, cache: ArrayTree, fresh: ArrayTree, version: Array, positions: Array
    ) -> ArrayTree:
        """Returns the cache with the tokens of one version of each row in it.

        fresh: what `beside` returned.
        version: [B] the number of the version.
        positions: [B, Q] the positions of the tokens; max_len for tokens that are not
            stored.
        """


def bound(model: Model) -> tuple[Any, ArrayTree]:
    """Returns the pair (network, params) of a loaded model in the form that decoding
    needs. A pair is returned as it is.

    Inside your own jitted function, use the pair, whose parameters are traced.
    """
    check_model(model, TextModel, tuple)
    return model if isinstance(model, tuple) else model.for_decoding


class Prompts(NamedTuple):
    """Prompts of different lengths as arrays, which may be traced under jit.

    tokens: [B, P] ids. Each prompt begins at the left edge of its row, and the ids
        after it are ignored.
    lengths: [B] the number of tokens in each prompt.
    """

    tokens: Any
    lengths: Any


PromptsLike = Prompts | tuple[Array, Array] | Sequence[Sequence[int]]


def pad_prompts(prompts: Sequence[Sequence[int] | np.ndarray]) -> Prompts:
    """Turns lists of ids into arrays, padded with zeros on the right.

    For example, [[5, 6], [7]] becomes the tokens [[5, 6], [7, 0]] and the lengths
    [2, 1].
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(lengths), max(lengths, default=0)), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    return Prompts(tokens, lengths)


def as_prompts(prompts: PromptsLike) -> Prompts:
    """Returns prompts as arrays. Lists are padded, and a tuple must be (tokens,
    lengths)."""
    if not (isinstance(prompts, tuple) or all(map(_are_ids, prompts))):
        raise UserError(
            "prompts are lists of ids, such as [[5, 6], [7]]; the ids of a text are"
            " cspd_jax.tokenizers.load_tokenizer(model).encode(text)"
        )
    found = Prompts(*prompts) if isinstance(prompts, tuple) else pad_prompts(prompts)
    chex.assert_shape(found.tokens, (len(found.lengths), None))
    return found


def _are_ids(prompt: Any) -> bool:
    ids = np.asarray(prompt)
    return ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size)


def concrete(value: ArrayLike | None) -> np.ndarray | None:
    """Returns a value as a numpy array; None if the value is None or is traced."""
    return (
        None
        if value is None or isinstance(value, jax.core.Tracer)
        else np.asarray(value)
    )


def check_prompts(
    config: LanguageModelConfig, prompts: Prompts, new: int, shortest: int = 1
) -> None:
    """Raises a UserError if a prompt is shorter than `shortest`, has an id that the
    model does not know or the id of the mask, or leaves no positions for `new` more
    tokens."""
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
            "there is no prompt"
            if not len(lengths)
            else f"a prompt is empty; it needs at least {shortest} token to begin with"
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
