"""The file of scaling.py as Markdown."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

from cspd_jax.parallel import DATA, MODEL

Row = dict[str, Any]


def print_tables(content: Row) -> None:
    samplers = sorted(content.get("samplers", []), key=lambda row: (*_program(row), *_mesh(row)))
    print("\n## Messages, counted\n")
    names = (
        "program", "mesh", "in a group, each step", "bytes, each step", "between groups in the loops",
        "between groups at the end",
    )  # fmt: skip
    _print(names, (_messages(row) for row in samplers if _mesh(row) != (1, 1)))
    print("\n## Time of a step, modelled\n")
    alone = {_program(row): row["modelled_seconds_per_step"] for row in samplers if _mesh(row) == (1, 1)}
    names = ("program", "mesh", "kernels", "messages", "one device / this", "efficiency")
    _print(names, (_time(row, alone.get(_program(row))) for row in samplers))
    print("\n## Memory of each device, counted by the compiler\n")
    names = ("program", "mesh", "arguments", "peak")
    _print(names, ((_name(row), _mesh_name(row), *_memory(row)) for row in samplers))
    print("\n## State of a training run on each device\n")
    states = content.get("state", [])
    _print(("model", "devices", "state"), (_state(row) for row in states))
    for row in content.get("waiting", []):
        parts = ", ".join(f"{n}: {100 * share:.1f} %" for n, share in row["efficiency_by_groups"].items())
        print(f"\nWaiting for the slowest of so many groups of {row['images']} images: {parts}")


def _print(names: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    names = list(names)
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def _program(row: Row) -> tuple:
    return row["model"], row["dtype"], row["method"], row["rows"]


def _mesh(row: Row) -> tuple[int, int]:
    return row["mesh"][DATA], row["mesh"][MODEL]


def _name(row: Row) -> str:
    return f"{row['model']}, {row['dtype']}, {row['method']}"


def _mesh_name(row: Row) -> str:
    return "{} x {}".format(*_mesh(row))


def _messages(row: Row) -> tuple[str, ...]:
    inside = [m for m in row["messages"] if m["loops"] and not m["between_groups"]]
    kinds: collections.Counter = collections.Counter()
    for m in inside:
        kinds[m["kind"]] += m["times"] / row["turns"]
    each = ", ".join(f"{_count(number)} {kind}" for kind, number in sorted(kinds.items()))
    moved = sum(m["times"] * m["bytes"] for m in inside) / row["turns"]
    between = [m for m in row["messages"] if m["between_groups"]]
    return (
        _name(row), _mesh_name(row), each or "none", _size(moved) if inside else "0",
        str(sum(1 for m in between if m["loops"])),
        _ends([m for m in between if not m["loops"]]),
    )  # fmt: skip


def _ends(messages: list[Row]) -> str:
    if not messages:
        return "none"
    return f"{_count(sum(m['times'] for m in messages))}, {_size(sum(m['bytes'] for m in messages))}"


def _time(row: Row, alone: float | None) -> tuple[str, ...]:
    kernels, messages = row["modelled_seconds_per_step"], row["modelled_message_seconds_per_step"]
    faster = None if alone is None else alone / (kernels + messages)
    return (
        _name(row), _mesh_name(row), f"{1e3 * kernels:.2f} ms", f"{1e3 * messages:.2f} ms",
        "" if faster is None else f"{faster:.2f}",
        "" if faster is None else f"{100 * faster / _mesh(row)[1]:.0f} %",
    )  # fmt: skip


def _memory(row: Row) -> tuple[str, str]:
    return _gib(row["memory"]["arguments"]), _gib(row["memory"]["peak"])


def _state(row: Row) -> tuple[str, str, str]:
    return row["model"], str(row["devices"]), f"{row['bytes'] / 2**30:.2f} GiB"


def _count(number: float) -> str:
    return f"{number:.0f}" if abs(number - round(number)) < 0.05 else f"{number:.1f}"


def _size(number: float) -> str:
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= of:
            return f"{number / of:.3g} {unit}"
    return f"{number:.0f} B"


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f} GiB"
