"""A decoder-only transformer: GPT-NeoX, Llama and Qwen2, and masked-diffusion models,
by configuration.

Matrix products and activations run in `dtype`; normalisation, rotation, softmax and
logits in at least float32.

The cache has one slot per position. A call writes the keys and values of its tokens
into the slots of their positions and lets every token see the slots up to its own
position. To roll back, simply continue from an earlier position: later slots are
overwritten before anything reads them.
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

    family: whose conventions it follows, for example gpt_neox, llama or qwen2.
    known_ids: ids from this one on have no token (padding of the vocabulary);
        vocab_size if that is unknown.
    kv_heads: heads of keys and values; each serves heads / kv_heads query heads.
    activation: gelu (by erf), gelu_tanh or silu.
    gated_mlp: down(activation(gate x) * up x); otherwise there is no gate.
    norm: layer (with bias) or rms.
    parallel_residual: x + attention(norm x) + mlp(norm' x).
    rope_theta: base of the rotary frequencies.
    rotary_share: fraction of head_dim that is rotated.
    rope_scaling: none; linear, which divides all frequencies by rope_factor; or llama3,
        which divides those that turn less than rope_low_frequency times in
        rope_original_positions, and keeps those that turn more than rope_high_frequency
        times.
    max_positions: the length it was made for.
    causal: False for masked-diffusion models.
    shifted: hidden state i - 1 predicts the token at position i of a masked-diffusion
        model, as in Dream.
    bos_ids: ids that begin a text; possibly none.
    eos_ids: ids that end a text; possibly none.
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
        return self.family == "qwen3"

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head are rotated; always the first ones."""
        return int(self.rotary_share * self.head_dim)


def frequencies(config: LMConfig) -> np.ndarray:
    """Returns the radians per position of each rotated pair: [rotary_dim / 2]
    float64."""
    plain = config.rope_theta ** (
        -np.arange(0, config.rotary_dim, 2) / config.rotary_dim
    )
    if config.rope_scaling == "none":
        return plain
    slowed = plain / config.rope_factor
    if config.rope_scaling == "linear":
        return slowed
    # llama3: the number of turns that a pair makes over the original length determines
    # how much it is slowed.
    turns = config.rope_original_positions * plain / (2 * math.pi)
    low = config.rope_low_frequency
    high = config.rope_high_frequency
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * plain + (1 - kept) * slowed


def rotation(
    config: LMConfig, positions: Array, dtype=jnp.float32
) -> tuple[Array, Array]:
    """Maps positions [B, Q] to cosines and sines [B, Q, 1, rotary_dim / 2], the same
    for all heads."""
    wide = jnp.promote_types(dtype, jnp.float32)
    angles = positions[:, :, None, None].astype(wide) * jnp.asarray(
        frequencies(config), wide
    )
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos_sin: tuple[Array, Array]) -> Array:
    """Rotates the first rotary_dim dimensions of x [B, Q, H, Dh] in pairs (i, i +
    rotary_dim / 2)."""
    cos, sin = cos_sin
    half = cos.shape[-1]
    a = x[..., :half]
    b = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    turned = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)


class Head(nn.Module):
    """Maps h [..., D] to logits [..., V] in at least float32, whatever the weights are
    in."""

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
    """Maps h [..., D] by a table, [V, D] by ids or [D, V], to [..., V]. turned: by
    `product`."""
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
        to itself.

        packed: says which tokens x holds, [1, N, D]."""
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
            out = attend_beside(q, k, v, slots, *visible)  # type: ignore[arg-type]  # versions stand beside a cache
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
    """What a pass of a language model returns.

    logits: [B, ...] logits [B, Q, V], or [B, R, V] of the rows that were asked for, or
        what is read from them.
    cache: with the tokens of the pass in it.
    states: [B, Q, S D] what entered the S layers asked for, side by side; None if none
        were.
    """

    logits: Array
    cache: ArrayTree
    states: Array | None


class Transformer(nn.Module):
    """Maps ids to embeddings, those to hidden states, those to logits. Models whose
    sequences are not all text use the parts."""

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
        """Maps ids [...] to [..., D]."""
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
        """Maps embeddings x [B, Q, D] at positions [B, Q], visible [B or 1, Q or 1, K],
        to hidden states after the last norm, the new cache, and what enters some of the
        layers.

        rows [B, R] picks the tokens whose hidden states come out: [B, R, D]. places [B,
        Q] are the slots that store the tokens; without them, those of the positions.
        packed computes some of the tokens: [1, N, D]. entering: the S layers of which
        [B, Q, S D] comes out, side by side; None without any. The number of layers
        stands for what leaves the last one."""
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
        """Maps hidden states [..., D] to [..., V]."""
        if self.config.tie_embeddings:
            table = self.embed.embedding.astype(self.dtype)
            return _logits(h, table, True, self.by_outputs and is_large(table.shape))
        return self.head(h)

    def __call__(self, tokens: Array, *args, **kwargs) -> Pass:
        """Makes a pass over ids [B, Q], and what else `hidden` takes. Logits of `rows`
        alone are [B, R, V], those of packed tokens [1, N, V]."""
        h, cache, states = self.hidden(self.embedded(tokens), *args, **kwargs)
        return Pass(self.logits(h), cache, states)


@dataclasses.dataclass(frozen=True)
class LM:
    """A language model as pure functions of explicit parameters: a static argument of
    jitted functions.

    by_outputs: the parameters are those of `products.by_outputs`, which suit a CPU.
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
        """Makes zeros for `batch` rows of up to `max_len` tokens."""
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
        mask: Array | None = None,
        rows: Array | None = None,
        entering: tuple[int, ...] = (),
    ) -> Pass:
        """Returns logits [B, Q, V] of tokens [B, Q] at positions [B, Q], and the cache
        with them in it.

        A token sees the slots at positions up to its own, the tokens of this call
        included. A row's positions differ from each other and those outside 0..max_len
        - 1 are padding: nothing is stored, and the logits there are finite and
        meaningless. Without the causal mask every slot is seen. mask [B, max_len]
        (bool) hides slots on top of that. rows [B, R] are indices into Q: logits [B, R,
        V] of those alone. entering: layers; what enters them is returned."""

        def run(params, tokens, positions, cache, mask):
            visible = cache.seen_from(positions) if self.config.causal else None
            return self._run(
                params,
                tokens,
                positions,
                _and(visible, mask),
                cache,
                rows,
                entering=entering,
            )

        def run_padded(params, tokens, positions, cache, mask):
            padding = ((0, 0), (0, FEWEST_ROWS - 1))
            tokens = jnp.pad(tokens, padding)
            positions = jnp.pad(positions, padding, constant_values=cache.max_len)
            logits, cache, states = run(params, tokens, positions, cache, mask)
            first = lambda a: a[:, :1]
            return Pass(first(logits), cache, jax.tree.map(first, states))

        operands = params, tokens, positions, cache, mask
        if tokens.size > 1 or rows is not None:
            return run(*operands)
        return by_device(*operands, cpu=run, accelerator=run_padded)

    @property
    def packs(self) -> bool:
        """Whether a pass over many tokens takes longer than one over few, so that
        `apply_packed` pays."""
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
        """Returns read(logits) [B, Q, ...], and the cache, as `apply` does, computed
        for the tokens at positions 0..max_len - 1 alone, of which there must be at most
        `size`. For the others it is zeros.

        read: from logits [1, size, V] to [1, size, ...].
        entering: as in `apply`.
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
        """Returns what `apply` makes logits of, the hidden states [B, Q, D] after the
        last norm; the cache; and what enters some of the layers, side by side."""
        visible = cache.seen_from(positions)

        def run(network: Transformer):
            return network.hidden(
                network.embedded(tokens), positions, visible, cache, entering=entering
            )

        return self._applied(run, params)

    def logits(self, params: ArrayTree, h: Array) -> Array:
        """Maps hidden states [..., D] to [..., V]. Of the parameters, the head or tied
        table is enough."""
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
        """Does what `apply` does for tokens that may share positions, such as those of
        a tree of drafts.

        They are stored in the cache's slots [B, Q], and each sees the slots that
        visible [B, Q, max_len] (bool) says, those of this call included.
        """
        return self._run(
            params, tokens, positions, visible, cache, None, slots, entering=entering
        )

    def move(self, cache: Cache, sources: Array, targets: Array) -> Cache:
        """Copies what is in the slots `sources` [B, M] into the slots `targets` [B, M];
        targets outside 0..max_len - 1 are dropped. Keys keep the rotation of the
        position that they were made at."""

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
        """Returns logits [B, N, V] of whole rows of tokens [B, N], without a cache.

        mask [B, N] (bool) hides tokens, such as padding on either side: positions count
        from the start of the row, but only their differences matter. rows as in
        `apply`. Of a shifted model the logits at i are those of hidden state i - 1, so
        that they are of the token at i (at the first: its own).
        """
        steps = jnp.arange(tokens.shape[1])
        if self.config.shifted:
            wanted = jnp.broadcast_to(steps, tokens.shape) if rows is None else rows
            rows = jnp.maximum(wanted - 1, 0)
        visible = (steps <= steps[:, None])[None] if self.config.causal else None
        if mask is not None:
            # A hidden token weighs 0, but 0 times NaN is NaN.
            tokens = jnp.where(mask, tokens, 0)
        positions = jnp.broadcast_to(steps, tokens.shape)
        return self._run(
            params, tokens, positions, _and(visible, mask), None, rows
        ).logits

    def beside(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: Cache,
        *,
        own: Array,
        mask: Array,
    ) -> Array:
        """Returns logits [B, R, Q, V] of R versions tokens [B, R, Q] of the same
        positions [B, Q].

        It is for models without a causal mask, and stores nothing. A token sees its
        version's tokens where own [B, Q] says so, and the slots of mask [B, max_len],
        which should leave these positions out. The logits are those of the hidden
        states, also of a shifted model.
        """
        versions = tokens.shape[1]
        flat = tokens.reshape(-1, tokens.shape[2])
        logits = self._run(
            params,
            flat,
            jnp.repeat(positions, versions, axis=0),
            Beside(own, mask),
            cache,
        ).logits
        return logits.reshape(*tokens.shape, -1)

    def _run(self, params: ArrayTree, *args, **kwargs) -> Pass:
        return self._applied(Transformer.__call__, params, *args, **kwargs)

    def _applied(
        self, function: Callable[..., Made], params: ArrayTree, *args, **kwargs
    ) -> Made:
        """Returns function(network, ...), of a network with these parameters."""
        network = Transformer(self.config, self.dtype, self.by_outputs)
        own = {"params": expand(params, self.dtype)}
        return nn.apply(function, network)(own, *args, **kwargs)


def _and(visible: Array | None, mask: Array | None) -> Array | None:
    """Joins visible [B or 1, Q, K] and mask [B, K], either of which may be None."""
    if mask is None:
        return visible
    return mask[:, None] if visible is None else visible & mask[:, None]


def init_params(config: LMConfig, key: Array) -> dict:
    """Makes fresh float32 parameters: normal of standard deviation 0.02, biases 0,
    scales 1."""
    start = jnp.zeros((1, 1), jnp.int32)
    return Transformer(config).init(key, start, start, None)["params"]


abstract_params = described(init_params)
