"""Describes a program to be timed or counted on an accelerator, and the sizes of published models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from cspd_jax.networks.lm_config import LMConfig

STEPS = 100
PLAIN = ("plain", "text-plain", "stepwise")  # what the others are compared with
IDENTITY = (
    "model", "what", "batch", "guided", "dtype", "precision", "method", "options", "respacing", "num_iter",
)  # fmt: skip
PYTHIA_160M = LMConfig(
    family="gpt_neox", vocab_size=50304, known_ids=50304, width=768, depth=12, heads=12, kv_heads=12,
    head_dim=64, mlp_width=3072, max_positions=2048, activation="gelu", gated_mlp=False, norm="layer",
    parallel_residual=True, qkv_bias=True, out_bias=True, mlp_bias=True, rotary_share=0.25,
)  # fmt: skip
PYTHIA_1_4B = dataclasses.replace(
    PYTHIA_160M, width=2048, depth=24, heads=16, kv_heads=16, head_dim=128, mlp_width=8192
)
LLADA_8B = LMConfig(
    family="llada", vocab_size=126464, known_ids=126464, width=4096, depth=32, heads=32, kv_heads=32,
    head_dim=128, mlp_width=12288, max_positions=4096, rope_theta=500_000.0, causal=False, mask_ids=(126336,),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """Holds a program to be timed or counted.

    about: the row's identity and what is known of it beforehand.
    function: pure, of `args`.
    args: pytrees of arrays, without typed keys.
    tokens: of one row of the batch, made by one run.
    facts: of the output: what happened, with `trips` for `count_launches`.
    donated: numbers of the arguments that the program may overwrite.
    """

    about: dict[str, Any]
    function: Callable
    args: tuple
    tokens: int
    facts: Callable[[Any], dict[str, Any]] = lambda out: {}
    donated: tuple[int, ...] = ()

    def lowered(self, args: tuple | None = None):
        with jax.default_matmul_precision(self.about["precision"]):
            program = jax.jit(self.function, donate_argnums=self.donated)
            return program.lower(*(self.args if args is None else args))


def about(model: str, what: str, batch: int, method: str, **more) -> dict[str, Any]:
    """Returns a row's identity, and what else is known of it beforehand."""
    return {
        "model": model, "what": what, "batch": batch, "guided": False, "dtype": "float32", "precision": None,
        "method": method, "options": "", "respacing": f"ddim{STEPS}", "num_iter": None, **more,
    }  # fmt: skip


def alike(row: dict[str, Any]) -> tuple:
    """Returns what rows of different methods have in common."""
    names = [name for name in (*IDENTITY, "device", "jax") if name not in ("method", "options")]
    return tuple(str(row.get(name)) for name in names)


def method_of(row: dict[str, Any]) -> str:
    """Names a row's method with its options."""
    return row["method"] + (f" ({row['options']})" if row["options"] else "")
