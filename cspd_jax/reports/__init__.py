"""What a run leaves behind: its report and its pictures."""

from cspd_jax.reports.charts import acceptance_maps, bars
from cspd_jax.reports.image import Timing, identity, lossy, make_report, pages, rates, run_lengths
from cspd_jax.reports.pictures import picture, side_by_side

__all__ = [
    "Timing",
    "acceptance_maps",
    "bars",
    "identity",
    "lossy",
    "make_report",
    "pages",
    "picture",
    "rates",
    "run_lengths",
    "side_by_side",
]
