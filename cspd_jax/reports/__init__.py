"""What a run leaves behind: its report and its pictures."""

from cspd_jax.reports.charts import bars
from cspd_jax.reports.pictures import picture
from cspd_jax.reports.report import Timing, make_report, run_lengths

__all__ = ["Timing", "bars", "make_report", "picture", "run_lengths"]
