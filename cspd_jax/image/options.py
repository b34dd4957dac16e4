"""The options of a generation: one list for Python, the command line, reports, and what is compiled.

A field of `Options` is the only place where an option has its name, its default, its meaning and its check.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from cspd_jax._utils.arrays import as_array
from cspd_jax._utils.options import documented, option
from cspd_jax._utils.typed import check_fields, reported
from cspd_jax.errors import UserError, check_range, check_whole, shown

if TYPE_CHECKING:  # the command line makes its flags of this module and answers before jax is loaded
    from jax import Array

    from cspd_jax.image.chain.drafters import ChainDrafter
    from cspd_jax.image.chain.speculation import ChainSpeculation
    from cspd_jax.image.known import Known
    from cspd_jax.image.lossy.shortcuts import Annealing, Checkerboard
    from cspd_jax.image.order import Group, Raster, Spread

DENOISE = ("plain", "speculative", "auto")
DRAFTERS = ("gains", "jacobian")  # of denoising steps


def _number(name: str, value: Any) -> float:
    """A number, or an array of one, as a float."""
    from jax.core import Tracer

    if isinstance(value, Tracer):
        raise UserError(f"{name} is traced; give it to the `sample` of a plan, which is made outside jit")
    try:
        array = as_array(value)
        if array.size == 1 and (array.dtype.kind in "iuf" or array.dtype.name == "bfloat16"):
            value = float(array.reshape(()))
    except (ValueError, OverflowError):
        pass
    check_range(name, value)
    return float(value)


def _scale(name: str, value: Any) -> float:
    value = _number(name, value)
    if value < 0:
        raise UserError(f"{name} is {value}; guidance must be 0 or more (1 switches it off)")
    return value


def _temperature(name: str, value: Any) -> float:
    value = _number(name, value)
    if np.float32(value) <= 0:
        raise UserError(f"{name} is {value}; it must be above 0, also as a float32")
    return value


def _steps(name: str, value: Any) -> int | None:
    if value is not None:
        check_whole(name, value, -(2**63))
    return value


def _schedule(name: str, value: Any) -> str:
    from cspd_jax.image.order import check_schedule

    check_schedule(value)
    return value


def _denoise(name: str, value: Any) -> ChainSpeculation | str:
    from cspd_jax.diffusion.schedule import NUM_TRAIN_STEPS
    from cspd_jax.image.chain.speculation import ChainSpeculation

    if isinstance(value, str) and value in ("plain", "auto"):
        return value
    if isinstance(value, str) and value == "speculative":
        value = ChainSpeculation()
    if not isinstance(value, ChainSpeculation):
        raise UserError(
            f"denoise {shown(value)} is unknown; it is {', '.join(DENOISE)}, or a ChainSpeculation"
        )
    lengths = value.draft_lengths
    if isinstance(lengths, list) or (isinstance(lengths, np.ndarray) and lengths.ndim == 1):
        value = dataclasses.replace(value, draft_lengths=tuple(lengths))
    elif isinstance(lengths, numbers.Integral):
        value = dataclasses.replace(value, draft_lengths=(lengths,))
    if not isinstance(value.draft_lengths, tuple) or not value.draft_lengths:
        raise UserError(
            f"draft_lengths is {shown(lengths)}; it must hold at least one number of steps, as in (16,)"
        )
    if not isinstance(value.drafter, str) or value.drafter not in DRAFTERS:
        raise UserError(f"drafter {shown(value.drafter)} is unknown; it is {' or '.join(DRAFTERS)}")
    for length in value.draft_lengths:
        check_whole("a draft length (window)", length, 1, NUM_TRAIN_STEPS)
    return value


def _drafter(name: str, value: Any) -> ChainDrafter | None:
    if value is not None and (isinstance(value, type) or not hasattr(value, "start")):
        raise UserError(
            f"{name} is {shown(value)}; it must be a drafter of denoising steps, as calibration fits one"
        )
    return value


def _buckets(name: str, value: Any) -> int | None:
    if value is not None:
        check_whole(name, value, 1, 1024)
    return value


def _known(name: str, value: Any) -> Known | None:
    from cspd_jax.image.known import Known

    if not isinstance(value, Known | None):
        raise UserError(f"{name} is {shown(value)}; it must be a Known(tokens, mask)")
    return value


def _anneal(name: str, value: Any) -> Annealing | None:
    from cspd_jax.image.lossy.shortcuts import Annealing

    if not isinstance(value, Annealing | None):
        raise UserError(f"{name} is {value!r:.80}; it must be an Annealing, for example Annealing(50, 5)")
    return value


def _order(name: str, value: Any) -> Checkerboard | Raster | Spread | None:
    from cspd_jax.image.lossy.shortcuts import Checkerboard
    from cspd_jax.image.order import Raster, Spread

    if not isinstance(value, Checkerboard | Raster | Spread | None):
        raise UserError(
            f"{name} is {value!r:.80}; it must be a Spread or a Checkerboard, for example Spread()"
        )
    return value


@documented
@dataclasses.dataclass(frozen=True)
class Options:
    """How images are generated, whatever the method.

    `plan.resolve` checks them and fills in what the model decides. They are handed on as they are, into
    jitted functions too: a pytree of what compiles nothing new, the rest static.
    """

    denoise: ChainSpeculation | str = option(
        "plain",
        "plain: denoising steps one at a time; speculative: drafted and verified together, with the same"
        " distribution",
        _denoise,
        flags=("--denoise",),
        report="chain",
        static=True,
    )
    num_iter: int | None = option(
        None, "AR steps (default: one per token)", _steps, flags=("--num-iter",), static=True
    )
    respacing: str | int | None = option(
        None,
        'denoising steps, for example "100" or "ddim50"; of a flow head its noisy steps, as in "50"'
        " (default: as the model was made for)",
        flags=("--steps",),
        metavar="STEPS",
        static=True,
    )
    cfg: Array | float = option(
        1.0, "guidance scale; 1 is no guidance (default: 1)", _scale, flags=("--cfg",)
    )
    cfg_schedule: str = option(
        "linear",
        "how the guidance scale develops along the AR steps (default: linear)",
        _schedule,
        flags=("--cfg-schedule",),
        choices=("linear", "constant"),
        static=True,
    )
    temperature: Array | float = option(
        1.0, "of the denoising noise (default: 1)", _temperature, flags=("--temperature",)
    )
    final_noise: bool | None = option(
        None,
        "noise in the last denoising step (default: on where the criterion needs it, otherwise off)",
        flags=("--final-noise",),
        static=True,
    )
    chain_drafter: ChainDrafter | None = option(
        None, "drafts denoising steps, in place of the calibrated drafter", _drafter, report=""
    )
    draft_drafter: ChainDrafter | None = option(
        None, "the same for the chains of the draft model", _drafter, report=""
    )
    anneal: Annealing | None = option(
        None,
        "lossy: denoising steps fall from FIRST to LAST along the AR steps, for example 50:5; with"
        " 50:5:cosine and 50:5:two-stage otherwise than in a line (DiSA)",
        _anneal,
        flags=("--anneal",),
        metavar="FIRST:LAST",
        static=True,
    )
    order: Checkerboard | Raster | Spread | None = option(
        None,
        "in which tokens are revealed; spread: each far from the last eight, another distribution (default:"
        " at random, as MAR does)",
        _order,
        flags=("--order",),
        report="reveal",
        metavar="{spread}",
        static=True,
    )
    known: Known | None = option(
        None, "tokens that stay as they are; the rest is generated given them", _known, report=""
    )
    prefix_buckets: int | None = option(
        None,
        "prefix lengths that the encoder is compiled for; each AR step uses the shortest that will do",
        _buckets,
        static=True,
    )
    guided: bool | None = option(
        None, "whether an unconditional half runs (default: where cfg is not 1)", static=True
    )

    @property
    def chain(self) -> ChainSpeculation | None:
        """Speculation along the denoising chains; None runs them step by step."""
        return None if isinstance(self.denoise, str) else self.denoise

    @property
    def shortcuts(self) -> tuple[Annealing | Checkerboard, ...]:
        """What makes the distribution another one than the plain sampler's."""
        from cspd_jax.image.lossy.shortcuts import Annealing, Checkerboard

        return tuple(s for s in (self.anneal, self.order) if isinstance(s, Annealing | Checkerboard))

    @property
    def separate_first(self) -> bool:
        """Whether the halves of guidance draw their first tokens apart, as SphereAR's do: its scale is 1."""
        from cspd_jax.image.order import RISING

        return bool(self.guided) and self.cfg_schedule == RISING

    def groups(self, length: int) -> tuple[Group, ...]:
        """The groups of all AR steps that reveal something."""
        from cspd_jax.image.order import reveal_groups

        num_iter = length if self.num_iter is None else self.num_iter
        return reveal_groups(length, num_iter) if self.order is None else self.order.groups(length, num_iter)

    def respacings(self, length: int) -> list[str]:
        """The respacing of each of those AR steps."""
        count = len(self.groups(length))
        if self.anneal is not None:
            return self.anneal.respacings(str(self.respacing), count)
        return [str(self.respacing)] * count

    def checked(self) -> Options:
        """The same as it is meant; UserError for values that no model can have."""
        meant = Options(**{name: _meant(name, getattr(self, name)) for name in FIELDS})
        check_fields(meant)
        if meant.guided is False and meant.cfg != 1:
            raise UserError(f"cfg is {meant.cfg}, and guided=False switches guidance off; leave one out")
        return meant

    def report(self) -> dict[str, Any]:
        """Returns the options as JSON, under the names that reports have."""
        return reported(dataclasses.replace(self, denoise=self.chain))  # type: ignore[arg-type]


def _meant(name: str, value: Any) -> Any:
    """The value as it is meant; UserError for one that cannot be."""
    check = FIELDS[name].metadata["check"]
    return value if check is None else check(name, value)


FIELDS = {field.name: field for field in dataclasses.fields(Options)}
