"""What a run leaves behind: its report and its pictures."""

from cspd_jax.reports.charts import acceptance_maps, pages
from cspd_jax.reports.pictures import picture, titled
from cspd_jax.reports.report import (
    beside,
    calls,
    cost,
    device,
    identity,
    in_words,
    lossy,
    make_report,
    rates,
    versions,
)

__all__ = [
    "acceptance_maps",
    "beside",
    "calls",
    "cost",
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
