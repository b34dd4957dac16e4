"""Each room of the house may only become smaller.

python tests/repository/test_size.py            # prints the rooms: lines, what is recorded, the ceiling
python tests/repository/test_size.py --write    # records what has become smaller
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("size.json")

# (folders and files inside cspd_jax/ or above it, the ceiling to reach), lines of Python, everything counted.
ROOMS = {
    "coupling, diffusion, keys": (("coupling", "diffusion", "keys.py"), 1600),
    "image": (("image",), 4300),
    "text": (("text", "sampling.py", "language_models.py"), 2300),
    "masked": (("masked",), 1450),
    "networks": (("networks",), 3200),
    "models, weights, hub, tokenizers": (
        ("models.py", "weights.py", "hub.py", "tokenizers.py"),
        650,
    ),
    "_utils, parallel, top level": (
        ("_utils", "check.py", "info.py", "measure.py", "parallel.py", "__init__.py"),
        700,
    ),
    "converters": (("../converters",), 2100),
    "training": (("training",), 2300),
    "cli, reports, tools": (("cli", "reports", "tools", "__main__.py"), 2400),
    "tests": (("../tests",), 12000),
    "benchmarks": (("../benchmarks",), 3000),
}
PAGES, MOST_WORDS = ("README.md", "docs"), 18000


def files(places: tuple[str, ...], base: Path, kind: str) -> list[Path]:
    found = []
    for place in places:
        path = base / place
        found += [path] if path.is_file() else path.rglob(f"*.{kind}")
    return found


def total(paths: list[Path], measure: Callable[[str], list[str]]) -> int:
    return sum(len(measure(path.read_text(encoding="utf-8"))) for path in paths)


def sizes() -> dict[str, tuple[int, int]]:
    """Returns (size, ceiling) of each room: lines of Python, and words of the pages."""
    found = {
        name: (total(files(places, ROOT / "cspd_jax", "py"), str.splitlines), ceiling)
        for name, (places, ceiling) in ROOMS.items()
    }
    found["words of the pages"] = total(files(PAGES, ROOT, "md"), str.split), MOST_WORDS
    return found


def test_no_room_grows():
    """What has become smaller is recorded by `--write`; below its ceiling a room is free."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    grown = {name: size for name, (size, most) in sizes().items() if size > max(recorded[name], most)}
    assert not grown, f"{grown} of {recorded}"


def test_every_file_of_the_package_is_in_a_room():
    counted = {
        path.resolve() for places, _ in ROOMS.values() for path in files(places, ROOT / "cspd_jax", "py")
    }
    assert not [path for path in (ROOT / "cspd_jax").rglob("*.py") if path.resolve() not in counted]


def main() -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    now = sizes()
    for name, (size, ceiling) in now.items():
        print(f"{name:28} {size:6} {recorded.get(name, size):6} {ceiling:6}")
    package = [size for name, (size, _) in now.items() if name not in ("tests", "benchmarks")][:-1]
    print(f"{'package with converters':28} {sum(package):6}")
    if "--write" in sys.argv:
        least = {name: min(size, recorded.get(name, size)) for name, (size, _) in now.items()}
        RECORDED.write_text(json.dumps(least, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
