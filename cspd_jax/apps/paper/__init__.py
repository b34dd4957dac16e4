"""The tables, figures and the formula of the paper, one experiment each, exact and lossy ways side by side.

Another experiment is a module with `EXPERIMENTS` and a name in the list below.
"""

from cspd_jax.apps.paper import ablations, guidance, images, quality, resampler, speed
from cspd_jax.apps.paper.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    one.name: one
    for module in (speed, quality, ablations, images, guidance, resampler)
    for one in module.EXPERIMENTS
}
# In the order of the paper: tables, figures, equations.
ORDER = ("table", "figure", "equation")
NAMES: tuple[str, ...] = tuple(
    sorted(
        EXPERIMENTS,
        key=lambda name: (
            next((i for i, kind in enumerate(ORDER) if name.startswith(kind)), len(ORDER)),
            int("".join(c for c in name if c.isdigit()) or 0),
        ),
    )
)

__all__ = ["EXPERIMENTS", "NAMES", "Experiment"]
