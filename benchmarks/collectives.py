"""Messages between devices in a compiled program, and a model of their time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from kernels import Instruction, bytes_of, computations, trips_of

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
)  # fmt: skip
PER_HOST = 8  # devices

# What the model of their time assumes: seconds of each, bytes a second of each device.
NEAR = {"latency_seconds": 10e-6, "bytes_per_second": 300e9}  # within a host, by NVLink
FAR = {"latency_seconds": 25e-6, "bytes_per_second": 50e9}  # between hosts
ASSUMED = {"devices_per_host": PER_HOST, "within_a_host": NEAR, "between_hosts": FAR}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A message among the devices of a group; all groups send theirs at the same time.

    kind: one of `KINDS`.
    bytes: of its operands, on one device.
    groups: devices by their place in the mesh.
    times: how often it is sent in a run of the program.
    loops: how many loops it is in.
    """

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    times: float
    loops: int

    def crosses(self, size: int) -> bool:
        """Whether it passes between different blocks of so many neighbouring devices."""
        return any(len({place // size for place in group}) > 1 for group in self.groups)

    @property
    def seconds(self) -> float:
        """Modelled, each time: the longest of the latency and of its bytes on the ring of its group."""
        path, size = FAR if self.crosses(PER_HOST) else NEAR, len(self.groups[0])
        share = {"all-reduce": 2 * (size - 1) / size, "all-gather": size - 1.0, "collective-permute": 1.0}
        sent = self.bytes * share.get(self.kind, (size - 1) / size)
        return max(path["latency_seconds"], sent / path["bytes_per_second"])


def collectives(
    text: str, trips: Sequence[float], devices: int, named: Mapping[str, float] | None = None
) -> list[Collective]:
    """All collectives of a compiled module, `as_text()`; those of a single device alone are none.

    trips, named: of the loops whose number of trips the compiler does not know, as for
        `kernels.count_launches`.
    devices: that the program runs on.
    """
    modules, entry = computations(text)

    def of(name: str, depth: int, loops: int, times: float) -> Iterator[Collective]:
        shapes = {at.name: at.result for at in modules[name]}
        for at in modules[name]:
            kind = at.op.removesuffix("-start")
            if at.op == "while":
                body = at.attribute(r"body=%?([\w.\-]+)") or ""
                condition = at.attribute(r"condition=%?([\w.\-]+)") or ""
                more, inside, _ = trips_of(at, depth, trips, named)
                yield from of(body, inside, loops + 1, times * more)
                yield from of(condition, inside, loops + 1, times * (more + 1))
            elif kind in KINDS:
                groups = _groups(at, devices)
                if len(groups[0]) > 1:
                    moved = sum(bytes_of(shapes.get(operand, "")) for operand in at.operands)
                    yield Collective(kind, moved, groups, times, loops)
            else:
                for called in _called(at):
                    if called in modules:
                        yield from of(called, depth, loops, times)

    return list(of(entry, 0, 0, 1.0))


def _called(at: Instruction) -> list[str]:
    """Computations that may hold collectives; of a choice all of them."""
    if at.op not in ("call", "async-start", "conditional"):
        return []
    names = re.findall(r"(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)", at.rest)
    branches = at.attribute(r"branch_computations=\{([^}]*)\}") or ""
    return names + re.findall(r"%?([\w.\-]+)", branches)


def _groups(at: Instruction, devices: int) -> tuple[tuple[int, ...], ...]:
    """{{0,1},{2,3}}; or [2,2]<=[4], the numbers from 0 on, row by row; or [2,2]<=[2,2]T(1,0), transposed
    before."""
    listed = at.attribute(r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\[[\d,]+\]<=\S+?)(?:, |$)")
    if not listed:
        return (tuple(range(devices)),)
    if listed.startswith("{"):
        return tuple(tuple(int(n) for n in part.split(",")) for part in re.findall(r"\{([\d,]+)\}", listed))
    shape, dims, _, order = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](T\(([\d,]+)\))?", listed).groups()
    numbers = np.arange(devices).reshape(_numbers(dims))
    numbers = numbers if order is None else numbers.transpose(_numbers(order))
    return tuple(tuple(row) for row in numbers.reshape(_numbers(shape)).tolist())


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
