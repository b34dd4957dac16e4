"""What a run leaves behind: its report and its pictures."""

from cspd_jax.reports.charts import bars
from cspd_jax.reports.heatmaps import acceptance_maps
from cspd_jax.reports.pages import lossy, pages, side_by_side
from cspd_jax.reports.pictures import picture
from cspd_jax.reports.report import Timing, identity, make_report, rates, run_lengths

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
