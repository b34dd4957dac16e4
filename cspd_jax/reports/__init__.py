"""What a run leaves behind: its report and its pictures."""

from cspd_jax.reports.pictures import picture
from cspd_jax.reports.report import Timing, make_report

__all__ = ["Timing", "make_report", "picture"]
