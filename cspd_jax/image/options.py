"""The options of a generation: one list for Python, the command line, reports, and what
is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from cspd_jax._utils.options import documented, option, reported
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.drafters import ChainDrafter
from cspd_jax.image.known import Known
from cspd_jax.image.lossy import Annealing, Checkerboard
from cspd_jax.image.order import RISING, Group, Raster, Spread, reveal_groups


@jax.tree_util.register_dataclass
@documented
@dataclasses.dataclass(frozen=True)
class Options:
    """How images are generated, whatever the method.

    `resolve` checks them against a model and fills in what the model decides. They are
    handed on as they are, into jitted functions too: a pytree of what compiles nothing
    new, the rest static.
    """

    denoise: ChainSpeculation | str = option(
        "plain",
        "plain: denoising steps one at a time; speculative: drafted and verified"
        " together, with the same distribution",
        static=True,
        flags=("--denoise",),
        choices=("plain", "speculative"),
    )
    num_iter: int | None = option(
        None,
        "AR steps (default: one per token)",
        flags=("--num-iter",),
        static=True,
        type=int,
    )
    respacing: str | int | None = option(
        None,
        'denoising steps, for example "100" or "ddim50"; of a flow head its noisy'
        ' steps, as in "50"'
        " (default: as the model was made for)",
        flags=("--steps",),
        metavar="STEPS",
        static=True,
    )
    cfg: jax.Array | float = option(
        1.0,
        "guidance scale, or one for each image; 1 is no guidance (default: 1)",
        flags=("--cfg",),
        type=float,
    )
    cfg_schedule: str = option(
        "linear",
        "how the guidance scale develops along the AR steps (default: linear)",
        flags=("--cfg-schedule",),
        choices=("linear", "constant"),
        static=True,
    )
    temperature: jax.Array | float = option(
        1.0, "of the denoising noise (default: 1)", flags=("--temperature",), type=float
    )
    final_noise: bool = option(
        True,
        "noise in the last denoising step, of standard deviation 0.006, without which"
        " the steps of drafts cannot be verified; off is MAR's own sampler (default:"
        " on; a flow has none)",
        static=True,
        flags=("--final-noise",),
        type=bool,
        metavar="on|off",
    )
    chain_drafter: ChainDrafter | None = option(
        None, "drafts denoising steps, in place of the calibrated drafter", report=""
    )
    draft_drafter: ChainDrafter | None = option(
        None,
        "drafts denoising steps of the draft model, in place of the calibrated drafter",
        report="",
    )
    anneal: Annealing | None = option(
        None,
        "lossy: denoising steps fall from FIRST to LAST along the AR steps, for example"
        " 50:5 (DiSA)",
        static=True,
    )
    order: Checkerboard | Raster | Spread | None = option(
        None,
        "in which tokens are revealed; spread: each far from the last eight, another"
        " distribution (default: at random, as MAR does)",
        static=True,
    )
    known: Known | None = option(
        None,
        "tokens that stay as they are; the rest is generated given them",
        report="",
    )
    prefix_buckets: int | None = option(
        None,
        "prefix lengths that the encoder is compiled for; each AR step uses the"
        " shortest that will do",
        static=True,
    )
    guided: bool | None = option(
        None,
        "whether an unconditional half runs (default: where cfg is not 1)",
        static=True,
    )

    @property
    def chain(self) -> ChainSpeculation | None:
        """Speculation along the denoising chains; None runs them step by step."""
        return None if isinstance(self.denoise, str) else self.denoise

    @property
    def shortcuts(self) -> tuple[Any, ...]:
        """What makes the distribution another one than the plain sampler's."""
        return tuple(
            shortcut
            for shortcut in (self.anneal, self.order)
            if hasattr(shortcut, "why")
        )

    @property
    def separate_first(self) -> bool:
        """Whether the halves of guidance draw their first tokens apart, as SphereAR's
        do: its scale is 1."""
        return bool(self.guided) and self.cfg_schedule == RISING

    def groups(self, length: int) -> tuple[Group, ...]:
        """Returns the groups of all AR steps that reveal something."""
        num_iter = length if self.num_iter is None else self.num_iter
        return (
            reveal_groups(length, num_iter)
            if self.order is None
            else self.order.groups(length, num_iter)
        )

    def respacings(self, length: int) -> list[str]:
        """Returns the respacing of each of those AR steps."""
        count = len(self.groups(length))
        if self.anneal is not None:
            return self.anneal.respacings(str(self.respacing), count)
        return [str(self.respacing)] * count

    def report(self) -> dict[str, Any]:
        """Returns the options as JSON."""
        told = reported(self)
        if hasattr(self.cfg, "tolist"):
            told["cfg"] = self.cfg.tolist()
        return told


FIELDS = {field.name: field for field in dataclasses.fields(Options)}
