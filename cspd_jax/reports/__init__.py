"""What a run leaves behind: its report and its pictures."""

from cspd_jax.reports.charts import pages
from cspd_jax.reports.pictures import picture, titled
from cspd_jax.reports.report import (
    beside,
    calls,
    device,
    identity,
    in_words,
    lossy,
    make_report,
    rates,
    versions,
)

__all__ = [
    "beside",
    "calls",
    "device",
    "identity",
    "in_words",
    "lossy",
    "make_report",
    "pages",
    "picture",
    "rates",
    "titled",
    "versions",
]
