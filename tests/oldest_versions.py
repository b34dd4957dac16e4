"""The lower bounds of pyproject.toml in `tests/oldest.txt`: `python tests/oldest_versions.py [--write]`."""

from __future__ import annotations

import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "tests/oldest.txt"
EXTRAS = ("hub", "text", "train", "test")
_LINTERS = ("ruff", "mypy")  # which check the code, and are no part of what runs


def pins() -> str:
    """A requirements file with exactly the lower bounds, one package a line."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(r for e in EXTRAS for r in project["optional-dependencies"][e])]
    bounds: dict[str, str] = {}
    for requirement in wanted:
        name, least = re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement).groups()
        if bounds.setdefault(name, least) != least:
            raise ValueError(f"pyproject.toml has two lower bounds of {name}: {bounds[name]} and {least}")
    return "".join(f"{name}=={least}\n" for name, least in bounds.items() if name not in _LINTERS)


def main() -> int:
    if "--write" in sys.argv[1:]:
        FILE.write_text(pins(), encoding="utf-8")
        return 0
    agree = FILE.read_text(encoding="utf-8") == pins()
    print(f"tests/oldest.txt {'has' if agree else 'does not have'} the lower bounds of pyproject.toml")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
