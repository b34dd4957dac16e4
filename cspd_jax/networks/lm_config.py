"""Sizes and conventions of a decoder-only transformer: the static argument of its jitted calls."""

from __future__ import annotations

import dataclasses
import math

from cspd_jax._utils import limits
from cspd_jax._utils.typed import check_kinds
from cspd_jax.errors import UserError, check_whole, shown

ACTIVATIONS = ("gelu", "gelu_tanh", "silu")
NORMS = ("layer", "rms")
ROPE_SCALINGS = ("none", "linear", "llama3")

_MOST = {
    "vocab_size": limits.IDS,
    "known_ids": limits.IDS,
    "width": limits.WIDTH,
    "depth": limits.LAYERS,
    "heads": limits.HEADS,
    "kv_heads": limits.HEADS,
    "head_dim": limits.WIDTH,
    "mlp_width": limits.HIDDEN,
    "max_positions": limits.POSITIONS,
    "rope_original_positions": limits.POSITIONS,
}


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """A language model over `vocab_size` ids.

    family: whose conventions it follows, for example gpt_neox, llama or qwen2.
    known_ids: ids from this one on have no token (padding of the vocabulary); vocab_size if that is unknown.
    kv_heads: heads of keys and values; each serves heads / kv_heads query heads.
    activation: gelu (by erf), gelu_tanh or silu.
    gated_mlp: down(activation(gate x) * up x); otherwise there is no gate.
    norm: layer (with bias) or rms.
    parallel_residual: x + attention(norm x) + mlp(norm' x).
    rope_theta: base of the rotary frequencies.
    rotary_share: fraction of head_dim that is rotated.
    rope_scaling: none; linear, which divides all frequencies by rope_factor; or llama3, which divides those
        that turn less than rope_low_frequency times in rope_original_positions, and keeps those that turn
        more than rope_high_frequency times.
    max_positions: the length it was made for.
    causal: False for masked-diffusion models.
    shifted: hidden state i - 1 predicts the token at position i of a masked-diffusion model, as in Dream.
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
        for field in dataclasses.fields(self):
            if field.type == "int":
                check_whole(f"the model's {field.name}", getattr(self, field.name), 1, _MOST[field.name])
        check_kinds(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "float" and not 0 < value < math.inf:
                raise UserError(f"the model's {field.name} is {value}; it must be a positive number")
        self._check_choice("activation", ACTIVATIONS)
        self._check_choice("norm", NORMS)
        self._check_choice("rope_scaling", ROPE_SCALINGS)
        if self.heads % self.kv_heads:
            raise UserError(f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly")
        if self.rotary_share > 1:
            raise UserError(
                f"the rotated share {self.rotary_share} of {self.head_dim} dimensions per head must be"
                " at most 1"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise UserError(
                f"the rotated share {self.rotary_share} of {self.head_dim} dimensions per head is"
                f" {self.rotary_dim}; it must be an even number from 2 to {self.head_dim}"
            )
        if self.rope_scaling == "llama3" and self.rope_low_frequency >= self.rope_high_frequency:
            raise UserError(
                f"the model's rope_low_frequency {self.rope_low_frequency} must be below its"
                f" rope_high_frequency {self.rope_high_frequency}"
            )
        if self.known_ids > self.vocab_size:
            raise UserError(f"the model knows {self.known_ids} ids of a vocabulary of {self.vocab_size}")
        for name in ("bos_ids", "eos_ids", "mask_ids"):
            if len(getattr(self, name)) > limits.LISTED:
                raise UserError(
                    f"the model's {name} are {len(getattr(self, name))}, more than {limits.LISTED}"
                )
            if wrong := [i for i in getattr(self, name) if not 0 <= i < self.vocab_size]:
                raise UserError(
                    f"the model's {name} hold {wrong[0]}, which is no id of a vocabulary of {self.vocab_size}"
                )
        if self.causal and (self.shifted or self.mask_ids):
            raise UserError("a causal model has neither mask_ids nor shifted predictions")
        if len(self.mask_ids) > 1:
            raise UserError(f"a masked-diffusion model has one id in mask_ids, not {len(self.mask_ids)}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or value not in choices:
            raise UserError(f"the model's {name} is {shown(value)}; it must be one of {', '.join(choices)}")

    @property
    def qk_norm(self) -> bool:
        """Whether each head's query and key are normalised before they are rotated, as Qwen3 does."""
        return self.family == "qwen3"

    @property
    def blocks(self) -> int:
        """Each has parameters."""
        return self.depth

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head are rotated; always the first ones."""
        return int(self.rotary_share * self.head_dim)

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads
