"""The options of a generation, in one list for Python, the command line and reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from cspd_jax._utils.options import documented, option, reported
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.known import Known
from cspd_jax.image.lossy import Annealing
from cspd_jax.image.order import Order


@documented
@dataclasses.dataclass(frozen=True)
class Options:
    """How images are generated, whatever the method. `resolve` turns the options into a
    `Recipe`, which leaves nothing open."""

    denoise: ChainSpeculation | str = option(
        "plain",
        "plain: denoising steps one at a time; speculative: drafted and verified"
        " together, with the same distribution",
        flags=("--denoise",),
        choices=("plain", "speculative"),
    )
    num_iter: int | None = option(
        None,
        "AR steps (default: one per token; more change nothing)",
        flags=("--num-iter",),
        within=(1, 2**16),
        type=int,
    )
    respacing: str | int | None = option(
        None,
        'denoising steps, for example "100" or "ddim50"; of a flow head its noisy'
        ' steps, as in "50"'
        " (default: as the model was made for)",
        flags=("--respacing",),
        metavar="SPEC",
    )
    cfg: jax.Array | float = option(
        1.0,
        "guidance scale, or one for each image; 1 is no guidance (default: 1, and on"
        " the command line what the model recommends)",
        flags=("--cfg",),
        within=(0, None),
        type=float,
    )
    cfg_schedule: str = option(
        "linear",
        "how the guidance scale develops along the AR steps: linear or constant"
        " (default: linear)",
        flags=("--cfg-schedule",),
        choices=("linear", "constant"),
    )
    temperature: jax.Array | float = option(
        1.0,
        "scale of the denoising noise (default: 1, and on the command line what the"
        " model recommends)",
        flags=("--temperature",),
        within=(0, None),
        type=float,
    )
    final_noise: bool = option(
        True,
        "noise in the last denoising step, of standard deviation 0.006, without which"
        " drafted tokens cannot be verified; MAR's own sampler has none, and a flow"
        " never has any (default: on)",
        flags=("--final-noise",),
        type=bool,
        metavar="on|off",
    )
    anneal: Annealing | None = option(
        None,
        "lossy: denoising steps fall along the AR steps (DiSA); 50:5, in Python"
        " `image.Annealing(50, 5)`, is from 50 to 5",
    )
    order: Order | None = option(
        None,
        "the order in which tokens are revealed; spread (in Python `image.Spread()`)"
        " keeps each token far from the last eight, which is another distribution"
        " (default: random, as in MAR)",
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
        within=(1, None),
    )

    @property
    def chains(self) -> bool:
        """Whether the sampler speculates along the denoising chains."""
        return self.denoise != "plain"

    @property
    def shortcuts(self) -> tuple[Any, ...]:
        """The options with which the plain sampler draws from another distribution.
        Each of them has a reason `why`."""
        return tuple(
            shortcut
            for shortcut in (self.anneal, self.order)
            if hasattr(shortcut, "why")
        )

    def report(self) -> dict[str, object]:
        """Returns the options as a JSON object."""
        told = reported(self)
        if hasattr(self.cfg, "tolist"):
            told["cfg"] = self.cfg.tolist()
        return told


FIELDS = {field.name: field for field in dataclasses.fields(Options)}
