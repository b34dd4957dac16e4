"""Sizes and conventions of a decoder-only transformer, and of a head that drafts from
its states: the static arguments of their jitted calls."""

from __future__ import annotations

import dataclasses

from cspd_jax.check import UserError

_CHOICES = {
    "activation": ("gelu", "gelu_tanh", "silu"),
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


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """A drafting head in the form of EAGLE-3.

    layer: its one decoder layer, and how many ids it has of its own.
    entering: layers of the target, counted from 0; what enters them is read, side by
        side. Without any they are those of `published_layers`, for whatever target it
        is bound to.
    state_width: numbers of one such state, the target's width.
    target_ids: ids of the target.
    own_embedding: it has a table of the target's ids; otherwise it reads the target's.
    norm_before_residual: the state is normalised before it is added to what the layer
        makes of it.
    """

    layer: LMConfig
    entering: tuple[int, ...]
    state_width: int
    target_ids: int
    own_embedding: bool = False
    norm_before_residual: bool = False

    @property
    def states(self) -> int:
        """How many layers' states it reads."""
        return len(self.entering) or len(published_layers(6))

    def bound_to(self, depth: int | None) -> EagleConfig:
        """Returns the configuration for a target with this many layers; None is a
        target that does not say."""
        if self.entering:
            return self
        if depth is None:
            raise UserError(
                "the head names no layers, and the target does not say how many it has"
            )
        return dataclasses.replace(self, entering=published_layers(depth))

    @property
    def ids(self) -> int:
        """Of its own."""
        return self.layer.vocab_size


def published_layers(depth: int) -> tuple[int, int, int]:
    """Returns the low, middle and high layer of a target of `depth` layers that
    EAGLE-3's heads read."""
    low, high = (2, depth - 3) if depth >= 6 else (0, depth - 1)
    return low, depth // 2, high
