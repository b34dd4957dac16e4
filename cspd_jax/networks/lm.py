"""A decoder-only transformer. Its configuration makes it GPT-NeoX, Llama, Qwen2 or a
masked-diffusion model.

Matrix products and activations run in `dtype`. Normalisation, rotation, softmax and
logits run in at least float32.

The cache has one slot per position. A call writes the keys and values of its tokens
into the slots of their positions, and every token sees the slots up to its own
position. To roll back, simply continue from an earlier position: later slots are
overwritten before any token reads them.

For example, a row has 5 tokens, and a call reads drafts at the positions 5, 6 and 7. If
only the first draft is accepted, the next call reads tokens at positions from 6 on, and
a token at position 6 sees the slots 0 to 6. It does not see slot 7, which still holds
the last draft.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from chex import ArrayTree
from jax.typing import DTypeLike

from cspd_jax._utils.accelerators import FEWEST_ROWS, by_device
from cspd_jax.check import UserError
from cspd_jax.networks.attention import (
    Beside,
    Cache,
    Packing,
    attend,
    attend_beside,
    packing,
    write,
)
from cspd_jax.networks.layers import Norm, described, gelu, take_rows
from cspd_jax.networks.products import Dense, is_large, product
from cspd_jax.networks.quantised import expand

Array = jax.Array
Made = TypeVar("Made")
_NORMAL = nn.initializers.normal(0.02)
_ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}
_CHOICES = {
    "activation": _ACTIVATIONS,
    "norm": ("layer", "rms"),
    "rope_scaling": ("none", "linear", "llama3"),
}


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """A language model over `vocab_size` ids.

    family: the family whose conventions the model follows, for example gpt_neox, llama
        or qwen2.
    known_ids: the number of ids that have a token. Ids from this number on only pad the
        vocabulary. It is vocab_size if the number is unknown.
    kv_heads: the number of heads of keys and values. Each serves heads / kv_heads query
        heads.
    activation: gelu (by erf), gelu_tanh or silu.
    gated_mlp: whether the MLP is down(activation(gate x) * up x); otherwise it has no
        gate.
    norm: layer (with bias) or rms.
    parallel_residual: whether a layer computes x + attention(norm x) + mlp(norm' x).
    rope_theta: the base of the rotary frequencies.
    rotary_share: the fraction of head_dim that is rotated.
    rope_scaling: none; linear, which divides all frequencies by rope_factor; or llama3,
        which divides the frequencies that turn less than rope_low_frequency times in
        rope_original_positions, keeps the frequencies that turn more than
        rope_high_frequency times, and blends in between.
    max_positions: the length for which the model was made.
    causal: whether a token sees only itself and the tokens before it; False for
        masked-diffusion models.
    block: the number of tokens in a block of a masked-diffusion model that is causal
        between blocks: a token sees its own block and the blocks before it. It is 0 if
        a token sees the whole text.
    shifted: whether the hidden state i - 1 of a masked-diffusion model predicts the
        token at position i, as in Dream.
    bos_ids: the ids that begin a text; possibly none.
    eos_ids: the ids that end a text; possibly none.
    mask_ids: the id that stands for a token to be found; none in causal models.
    """

    family: str
    vocab_size: int
    known_ids: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    max_positions: int
    activation: str = "silu"
    gated_mlp: bool = True
    norm: str = "rms"
    norm_eps: float = 1e-5
    parallel_residual: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10_000.0
    rotary_share: float = 1.0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_low_frequency: float = 1.0
    rope_high_frequency: float = 4.0
    rope_original_positions: int = 8192
    tie_embeddings: bool = False
    causal: bool = True
    block: int = 0
    shifted: bool = False
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    mask_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise UserError(
                    f"the model's {name} is {value!r}; it must be one of"
                    f" {', '.join(choices)}"
                )
        if self.heads % self.kv_heads:
            raise UserError(
                f"{self.heads} query heads cannot share {self.kv_heads} key-value heads"
                " evenly"
            )
        if self.rotary_dim % 2:
            raise UserError(
                f"{self.rotary_dim} dimensions of a head cannot be rotated in pairs"
            )

    @property
    def qk_norm(self) -> bool:
        """Whether each head's query and key are normalised before they are rotated, as
        Qwen3 does."""
        return self.family in ("qwen3", "sdar")

    @property
    def rotary_dim(self) -> int:
        """The number of dimensions of a head that are rotated. They are the first
        ones."""
        return int(self.rotary_share * self.head_dim)

    def last_seen(self, positions: Array) -> Array | None:
        """Returns the last position that a token at each of the positions [...] sees;
        None if it sees the whole text."""
        if self.causal:
            return positions
        if self.block:
            return (positions // self.block + 1) * self.block - 1
        return None


def frequencies(config: LMConfig) -> np.ndarray:
    """Returns the radians per position of each rotated pair, float64
    [rotary_dim / 2]."""
    plain = config.rope_theta ** (
        -np.arange(0, config.rotary_dim, 2) / config.rotary_dim
    )
    if config.rope_scaling == "none":
        return plain
    slowed = plain / config.rope_factor
    if config.rope_scaling == "linear":
        return slowed
    # llama3: a pair is slowed less, the more turns it makes over the original length.
    turns = config.rope_original_positions * plain / (2 * math.pi)
    low = config.rope_low_frequency
    high = config.rope_high_frequency
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * plain + (1 - kept) * slowed


def rotation(
    config: LMConfig, positions: Array, dtype=jnp.float32
) -> tuple[Array, Array]:
    """Returns the cosines and sines [B, Q, 1, rotary_dim / 2] of the angles of each
    pair. They are the same for all heads.

    positions: [B, Q] the position of each token.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    angles = positions[:, :, None, None].astype(wide) * jnp.asarray(
        frequencies(config), wide
    )
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos_sin: tuple[Array, Array]) -> Array:
    """Rotates the first rotary_dim dimensions of x in pairs (i, i + rotary_dim / 2).

    x: [B, Q, H, Dh] queries or keys.
    cos_sin: the cosines and sines that `rotation` returns.

    With a rotary_dim of 4 and a head_dim of 6, the pairs are (0, 2) and (1, 3), and the
    dimensions 4 and 5 stay as they are.
    """
    cos, sin = cos_sin
    half = cos.shape[-1]
    a = x[..., :half]
    b = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    turned = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)


class Head(nn.Module):
    """Maps h [..., D] to logits [..., V] in at least float32, whatever the type of the
    weights."""

    vocab_size: int
    dtype: DTypeLike
    by_outputs: bool = False

    @nn.compact
    def __call__(self, h: Array) -> Array:
        shape = h.shape[-1], self.vocab_size
        turned = self.by_outputs and is_large(shape)
        kernel = self.param(
            "kernel", _NORMAL, shape[::-1] if turned else shape, jnp.float32
        )
        return _logits(h, kernel.astype(self.dtype), turned, turned)


def _logits(h: Array, table: Array, by_ids: bool, turned: bool) -> Array:
    """Maps h [..., D] to logits [..., V] by a table.

    table: the table, [V, D] if `by_ids` or `turned` is set, and otherwise [D, V].
    turned: whether `product` multiplies by the table.
    """
    wide = jnp.promote_types(h.dtype, jnp.float32)
    if turned:
        return product(h, table, wide)
    return jnp.einsum(
        "...d,vd->...v" if by_ids else "...d,dv->...v",
        h,
        table,
        preferred_element_type=wide,
    )


class Attention(nn.Module):
    """Causal or bidirectional self-attention with rotary positions and shared key
    heads."""

    config: LMConfig
    dtype: DTypeLike
    by_outputs: bool = False

    @nn.compact
    def __call__(
        self,
        x: Array,
        cos_sin,
        visible,
        positions: Array,
        slots,
        packed: Packing | None = None,
    ):
        """Maps x [B, Q, D] to ([B, Q, D], the updated slots). Without slots, x attends
        to itself. With `Beside`, the keys and values of x take the place of the slots.

        packed: says which tokens of [B, Q] x has, if x is packed as [1, N, D].
        """
        c = self.config
        project = lambda heads, name: Dense(
            heads * c.head_dim,
            c.qkv_bias,
            self.dtype,
            _NORMAL,
            self.by_outputs,
            name=name,
        )(x).reshape(*x.shape[:2], heads, c.head_dim)
        q = project(c.heads, "q")
        k = project(c.kv_heads, "k")
        v = project(c.kv_heads, "v")
        if c.qk_norm:
            q, k = (
                Norm(c.norm, c.norm_eps, self.dtype, name=f"{n}_norm")(x)
                for n, x in (("q", q), ("k", k))
            )
        q = rotate(q, cos_sin)
        k = rotate(k, cos_sin)
        if packed is not None:
            q, k, v = map(packed.unpack, (q, k, v))
        if isinstance(visible, Beside):
            out = attend_beside(q, k, v, slots, *visible)
            slots = k, v
        elif slots is None:
            out = attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), visible)
        else:
            keys, values = slots = (
                write(slots[0], k, positions),
                write(slots[1], v, positions),
            )
            out = attend(q, keys, values, visible)
        out = out.reshape(*out.shape[:2], -1)
        if packed is not None:
            out = packed.pack(out)
        dense = Dense(
            c.width, c.out_bias, self.dtype, _NORMAL, self.by_outputs, name="out"
        )
        return dense(out), slots


class Mlp(nn.Module):
    """The MLP of a layer, with or without a gate."""

    config: LMConfig
    dtype: DTypeLike
    by_outputs: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        activation = _ACTIVATIONS[c.activation]
        dense = lambda size, name: Dense(
            size, c.mlp_bias, self.dtype, _NORMAL, self.by_outputs, name=name
        )
        up = dense(c.mlp_width, "up")(x)
        h = (
            activation(dense(c.mlp_width, "gate")(x)) * up
            if c.gated_mlp
            else activation(up)
        )
        return dense(c.width, "down")(h)


class Layer(nn.Module):
    """A layer of the transformer: attention and an MLP, each behind a normalisation."""

    config: LMConfig
    dtype: DTypeLike
    by_outputs: bool = False

    @nn.compact
    def __call__(
        self,
        x: Array,
        cos_sin,
        visible,
        positions,
        slots,
        packed: Packing | None = None,
    ):
        c = self.config
        norm = lambda name: Norm(c.norm, c.norm_eps, self.dtype, name=name)
        attention = Attention(c, self.dtype, self.by_outputs, name="attention")
        attended, slots = attention(
            norm("attention_norm")(x), cos_sin, visible, positions, slots, packed
        )
        mlp = Mlp(c, self.dtype, self.by_outputs, name="mlp")
        mlp_norm = norm("mlp_norm")
        if c.parallel_residual:
            return x + attended + mlp(mlp_norm(x)), slots
        x = x + attended
        return x + mlp(mlp_norm(x)), slots


class Pass(NamedTuple):
    """The result of a pass of a language model.

    logits: [B, ...] the logits [B, Q, V], or the result of a function that reads them.
    cache: the cache with the tokens of the pass in it.
    states: [B, Q, S D] the hidden states that entered the S layers `entering`, side by
        side; None without layers.
    """

    logits: Array
    cache: ArrayTree
    states: Array | None


class Transformer(nn.Module):
    """Maps ids to embeddings, embeddings to hidden states, and hidden states to logits.
    A model whose sequences are not only text uses these parts one by one."""

    config: LMConfig
    dtype: DTypeLike = jnp.float32
    by_outputs: bool = False

    def setup(self):
        c = self.config
        self.embed = nn.Embed(
            c.vocab_size, c.width, dtype=self.dtype, embedding_init=_NORMAL
        )
        self.layers = [
            Layer(c, self.dtype, self.by_outputs, name=f"layers_{i}")
            for i in range(c.depth)
        ]
        self.norm = Norm(c.norm, c.norm_eps, self.dtype)
        if not c.tie_embeddings:
            self.head = Head(c.vocab_size, self.dtype, self.by_outputs)

    def embedded(self, tokens: Array) -> Array:
        """Maps ids [...] to embeddings [..., D]."""
        return self.embed(tokens)

    def hidden(
        self,
        x: Array,
        positions: Array,
        visible: Array | Beside | None,
        cache: Cache | None = None,
        rows: Array | None = None,
        places: Array | None = None,
        packed: Packing | None = None,
        entering: tuple[int, ...] = (),
    ) -> tuple[Array, Cache | None, Array | None]:
        """Returns the hidden states after the last norm, [B, Q, D], the new cache, and
        the hidden states that enter the layers `entering`.

        x: [B, Q, D] embeddings.
        positions: [B, Q] the position of each token.
        visible: which slots each token sees, bool [B or 1, Q or 1, K]; without a cache,
            which tokens; None for all. With a `Beside`, nothing is stored, and the
            second result has the keys and values of x alone.
        rows: [B, R] indices into Q. If they are given, the first result is [B, R, D].
        places: [B, Q] the slots that store the tokens, by default the slots of their
            positions.
        packed: says which N tokens are computed. The results are then [1, N, D].
        entering: S layers. The third result is [B, Q, S D], side by side; None without
            layers. The number of layers stands for the output of the last layer.
        """
        c = self.config
        cos_sin = rotation(c, positions, self.dtype)
        if packed is not None:
            x = packed.pack(x)
            cos_sin = jax.tree.map(packed.pack, cos_sin)
        slots = [None] * c.depth if cache is None else list(zip(*cache))
        before = [x]
        places = positions if places is None else places
        for i, layer in enumerate(self.layers):
            x, slots[i] = layer(x, cos_sin, visible, places, slots[i], packed)
            before.append(x)
        states = (
            jnp.concatenate([before[i] for i in entering], axis=-1)
            if entering
            else None
        )
        return (
            self.norm(take_rows(x, rows)),
            None if cache is None else Cache(*zip(*slots)),
            states,
        )

    def logits(self, h: Array) -> Array:
        """Maps hidden states [..., D] to logits [..., V]."""
        if self.config.tie_embeddings:
            table = self.embed.embedding.astype(self.dtype)
            return _logits(h, table, True, self.by_outputs and is_large(table.shape))
        return self.head(h)

    def __call__(self, tokens: Array, *args, **kwargs) -> Pass:
        """Makes a pass over ids [B, Q], with the other arguments of `hidden`. The
        logits are [B, R, V] if `rows` are given, and [1, N, V] for packed tokens."""
        h, cache, states = self.hidden(self.embedded(tokens), *args, **kwargs)
        return Pass(self.logits(h), cache, states)


@dataclasses.dataclass(frozen=True)
class LM:
    """A language model as pure functions of explicit parameters. It is hashable, so
    that it can be a static argument of jitted functions.

    by_outputs: whether the parameters are in the form of `products.by_outputs`, which
        suits a CPU.
    """

    config: LMConfig
    dtype: DTypeLike = jnp.float32
    by_outputs: bool = False

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def empty_cache(
        self, batch: int, max_len: int, dtype: DTypeLike | None = None
    ) -> Cache:
        """Makes a cache of zeros for `batch` rows of up to `max_len` tokens."""
        shape = (batch, self.config.kv_heads, max_len, self.config.head_dim)
        made = lambda: tuple(
            jnp.zeros(shape, dtype or self.dtype) for _ in range(self.config.depth)
        )
        return Cache(made(), made())

    def apply(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: Cache,
        *,
        rows: Array | None = None,
        entering: tuple[int, ...] = (),
    ) -> Pass:
        """Reads tokens, and returns their logits [B, Q, V] and the cache with the
        tokens in it.

        A token of a causal model sees the slots at positions up to its own, including
        tokens of this call. If the model is causal between blocks, it sees the slots up
        to the end of its block, which have to be filled. A token of any other model
        sees every slot. The positions of one row differ from each other.

        tokens: [B, Q] ids.
        positions: [B, Q] the position of each token. Tokens at positions outside
            0..max_len - 1 are padding: they are not stored, and their logits are finite
            and meaningless.
        rows: [B, R] indices into Q. If they are given, only their logits are computed,
            [B, R, V].
        entering: S layers. The hidden states that enter these layers are returned, too.
        """

        def run(params, tokens, positions, cache):
            last = self.config.last_seen(positions)
            visible = None if last is None else cache.seen_from(last)
            return self._run(
                params, tokens, positions, visible, cache, rows, entering=entering
            )

        def run_padded(params, tokens, positions, cache):
            padding = ((0, 0), (0, FEWEST_ROWS - 1))
            tokens = jnp.pad(tokens, padding)
            positions = jnp.pad(positions, padding, constant_values=cache.max_len)
            logits, cache, states = run(params, tokens, positions, cache)
            first = lambda a: a[:, :1]
            return Pass(first(logits), cache, jax.tree.map(first, states))

        operands = params, tokens, positions, cache
        if tokens.size > 1 or rows is not None:
            return run(*operands)
        return by_device(*operands, cpu=run, accelerator=run_padded)

    @property
    def packs(self) -> bool:
        """Whether a pass over many tokens takes longer than a pass over few, so that
        `apply_packed` saves time."""
        return self.by_outputs

    def apply_packed(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: Cache,
        *,
        size: int,
        read: Callable[[Array], Array],
        entering: tuple[int, ...] = (),
    ) -> Pass:
        """Does what `apply` does, but computes only the tokens that are not padding.
        Returns read(logits) [B, Q, ...] in place of the logits. The results for padding
        are zeros.

        tokens: [B, Q] ids.
        positions: [B, Q] the position of each token. Tokens at positions outside
            0..max_len - 1 are padding.
        size: a bound on the number of tokens that are not padding.
        read: maps logits [1, size, V] to [1, size, ...].
        entering: the same as in `apply`.
        """
        packed = packing((positions >= 0) & (positions < cache.max_len), size)
        visible = cache.seen_from(positions)
        logits, cache, states = self._run(
            params,
            tokens,
            positions,
            visible,
            cache,
            None,
            None,
            packed,
            entering=entering,
        )
        states = jax.tree.map(packed.unpack, states)
        return Pass(packed.unpack(read(logits)), cache, states)

    def hidden(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: Cache,
        entering: tuple[int, ...],
    ) -> tuple[Array, Cache, Array]:
        """Returns the hidden states [B, Q, D] after the last norm, from which `apply`
        computes the logits; the cache; and the hidden states that enter the layers
        `entering`, side by side.

        tokens: [B, Q] ids.
        positions: [B, Q] the position of each token.
        """
        visible = cache.seen_from(positions)

        def run(network: Transformer):
            return network.hidden(
                network.embedded(tokens), positions, visible, cache, entering=entering
            )

        return self._applied(run, params)

    def logits(self, params: ArrayTree, h: Array) -> Array:
        """Maps hidden states [..., D] to logits [..., V]. The parameters may lack
        everything but the head, or the embedding table if it is tied."""
        return self._applied(Transformer.logits, params, h)

    def apply_seeing(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: Cache,
        *,
        slots: Array,
        visible: Array,
        entering: tuple[int, ...] = (),
    ) -> Pass:
        """Does what `apply` does for tokens that may share positions, such as the nodes
        of a tree of drafts.

        tokens: [B, Q] ids.
        positions: [B, Q] the position of each token.
        slots: [B, Q] the slots of the cache that store the tokens.
        visible: [B, Q, max_len] bool, which slots each token sees. The slots of this
            call are filled before tokens see them.
        """
        return self._run(
            params, tokens, positions, visible, cache, None, slots, entering=entering
        )

    def move(self, cache: Cache, sources: Array, targets: Array) -> Cache:
        """Copies the contents of the slots `sources` into the slots `targets`. Keys
        keep the rotation of the position at which they were made.

        sources: [B, M] the slots that are copied.
        targets: [B, M] the slots that are overwritten. Targets outside 0..max_len - 1
            are dropped.
        """

        def moved(slots: Array) -> Array:
            found = jnp.take_along_axis(slots, sources[:, None, :, None], axis=2)
            return write(slots, found.swapaxes(1, 2), targets)

        return jax.tree.map(moved, cache)

    def forward(
        self,
        params: ArrayTree,
        tokens: Array,
        mask: Array | None = None,
        *,
        rows: Array | None = None,
    ) -> Array:
        """Returns the logits [B, N, V] of whole rows, without a cache.

        Positions count from the start of the row, but only differences of positions
        matter. In a shifted model each hidden state predicts the token after its own.
        So the logits at i are computed from the hidden state before i, and the logits
        at 0 from the first hidden state.

        tokens: [B, N] ids.
        mask: [B, N] bool, false hides a token, such as padding on either side.
        rows: [B, R] indices into N. If they are given, the logits are those at the
            indices, [B, R, V].
        """
        steps = jnp.arange(tokens.shape[1])
        if self.config.shifted:
            wanted = jnp.broadcast_to(steps, tokens.shape) if rows is None else rows
            rows = jnp.maximum(wanted - 1, 0)
        last = self.config.last_seen(steps)
        visible = None if last is None else (steps <= last[:, None])[None]
        if mask is not None:
            # A hidden token gets the weight 0, but 0 times NaN is NaN.
            tokens = jnp.where(mask, tokens, 0)
        positions = jnp.broadcast_to(steps, tokens.shape)
        return self._run(
            params, tokens, positions, _and(visible, mask), None, rows
        ).logits

    def denoise(self, params: ArrayTree, tokens: Array, clean: Array) -> Array:
        """Returns the logits [B, N, V] of rows that are causal between blocks, for all
        blocks in one pass. The tokens of a block see their own block, and the blocks
        before it as they are in the clean rows.

        tokens: [B, N] ids, with the mask's id at places to be filled.
        clean: [B, N] the ids of the same rows without masks.
        """
        count = tokens.shape[1]
        steps = jnp.tile(jnp.arange(count), 2)
        block = steps // self.config.block
        is_clean = jnp.arange(2 * count) >= count
        earlier = is_clean & (block < block[:, None])
        own = (block == block[:, None]) & (is_clean == is_clean[:, None])
        both = jnp.concatenate([tokens, clean], axis=1)
        at = steps[:count]
        if self.config.shifted:
            # The first place of a block is predicted by the clean block before it.
            begins = at % self.config.block == 0
            at = jnp.maximum(jnp.where(begins, at + count, at) - 1, 0).at[0].set(0)
        at = jnp.broadcast_to(at, tokens.shape)
        positions = jnp.broadcast_to(steps, both.shape)
        visible = (earlier | own)[None]
        return self._run(params, both, positions, visible, None, at).logits

    def beside(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: Cache,
        *,
        seen: Array,
    ) -> tuple[Array, ArrayTree]:
        """Reads R versions of the tokens at the same positions. Returns their logits
        [B, R, Q, V], and their keys and values [B R, Q, kv_heads, Dh], which `store`
        stores.

        This is for models that are causal between blocks. A token sees the tokens of
        its version up to the end of its block.

        tokens: [B, R, Q] the ids of each version.
        positions: [B, Q] the position of each token. Tokens at positions from max_len
            on are padding, which no token sees.
        seen: [B, max_len] bool, which slots of the cache a token sees. It should hide
            the slots of these positions.
        """
        versions = tokens.shape[1]
        block = positions // self.config.block
        own = (block[:, None] <= block[:, :, None]) & (positions < cache.max_len)[
            :, None
        ]
        logits, fresh, _ = self._run(
            params,
            tokens.reshape(-1, tokens.shape[2]),
            jnp.repeat(positions, versions, axis=0),
            Beside(own, seen),
            cache,
        )
        return logits.reshape(*tokens.shape, -1), fresh

    def store(
        self, cache: Cache, fresh: ArrayTree, version: Array, positions: Array
    ) -> Cache:
        """Writes the keys and values of one version of each row into the cache.

        fresh: the keys and values that `beside` returned.
        version: [B] the number of the version.
        positions: [B, Q] the positions of the tokens. Tokens at positions from max_len
            on are not stored.
        """
        rows = jnp.arange(len(version))

        def stored(slots: Array, new: Array) -> Array:
            of_row = new.reshape(len(version), -1, *new.shape[1:])
            return write(slots, of_row[rows, version], positions)

        return jax.tree.map(stored, cache, fresh)

    def _run(self, params: ArrayTree, *args, **kwargs) -> Pass:
        return self._applied(Transformer.__call__, params, *args, **kwargs)

    def _applied(
        self, function: Callable[..., Made], params: ArrayTree, *args, **kwargs
    ) -> Made:
        """Returns function(network, ...) for a network with these parameters."""
        network = Transformer(self.config, self.dtype, self.by_outputs)
        own = {"params": expand(params, self.dtype)}
        return nn.apply(function, network)(own, *args, **kwargs)


def _and(visible: Array | None, mask: Array | None) -> Array | None:
    """Returns visible & mask, bool [B or 1, Q or 1, K], or None if both are None.

    visible: [B or 1, Q, K] which keys each token sees.
    mask: [B, K] which keys may be seen at all.
    """
    if mask is None:
        return visible
    return mask[:, None] if visible is None else visible & mask[:, None]


def init_params(config: LMConfig, key: Array) -> dict:
    """Makes fresh float32 parameters. Kernels and embeddings are normal with the
    standard deviation 0.02, biases are 0, and scales are 1."""
    start = jnp.zeros((1, 1), jnp.int32)
    return Transformer(config).init(key, start, start, None)["params"]


abstract_params = described(init_params)
