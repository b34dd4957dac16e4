"""`report.json` of a folder of samples: sums over the records, the same whoever writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cspd_jax._utils.files import write_text
from cspd_jax.apps.bulk.folder import Record, read_record
from cspd_jax.apps.bulk.manifest import Manifest
from cspd_jax.image.exactness import Exactness

NAME = "report.json"
_CALLS = ("target_backbone", "target_head", "draft_backbone", "draft_head")


def make_report(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The totals of a finished job."""
    records = [read_record(folder, manifest, index) for index in range(manifest.shards)]

    def total(name: str) -> Any:
        return sum(getattr(record, name) for record in records)

    images, seconds, truncated = manifest.images, total("seconds"), total("truncated")
    lossless, why = Exactness(manifest.lossless, manifest.why).after(truncated)
    return {
        "kind": manifest.kind,
        "job": manifest.job,
        "method": manifest.method,
        "lossless": lossless,
        "why": why,
        "images": images,
        "first": manifest.first,
        "shards": len(records),
        "non_finite": total("non_finite"),
        "seconds": round(seconds, 3),
        "compile_seconds": round(total("compile_seconds"), 3),
        "images_per_second": round(images / seconds, 4) if seconds else None,  # of one process
        "rounds": total("rounds") / images,
        "sequential": {name: total(name) for name in _CALLS},
        "acceptance": _ratio(total("accepted"), total("tested")),
        "chain_acceptance": _ratio(total("chain_accepted"), total("chain_tested")),
        "truncated": truncated,
        "processes": _processes(records),
    }


def _ratio(accepted: int, tested: int) -> float | None:
    return accepted / tested if tested else None


def _processes(records: list[Record]) -> list[dict[str, Any]]:
    """What each process made, on which machine; an interrupted job has several in succession."""
    names = sorted({(record.process, record.device, record.jax) for record in records})
    found = []
    for name in names:
        own = [record for record in records if (record.process, record.device, record.jax) == name]
        images, seconds = sum(record.images for record in own), sum(record.seconds for record in own)
        process, device, jax = name
        found.append(
            {"process": process, "device": device, "jax": jax, "images": images, "seconds": round(seconds, 3)}
        )
    return found


def write_report(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Writes it unless it is there."""
    report = make_report(folder, manifest)
    text = json.dumps(report, indent=2) + "\n"
    path = folder / NAME
    if not path.is_file() or path.read_bytes() != text.encode():
        write_text(path, text)
    return report
