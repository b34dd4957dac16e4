"""The public names and signatures, as text.

python tests/public_api.py            # compares with golden/public_api.txt
python tests/public_api.py --write    # replaces it
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whatever is installed

import cspd_jax
from cspd_jax import image, masked, text

FILE = Path(__file__).parent / "golden" / "public_api.txt"


def described(name: str, what: object) -> list[str]:
    if dataclasses.is_dataclass(what) and isinstance(what, type):
        fields = [f"    {f.name}: {f.type}" for f in dataclasses.fields(what) if not f.name.startswith("_")]
        return [f"{name} (dataclass)", *fields, *_methods(what)]
    if isinstance(what, type) and hasattr(what, "_fields"):
        return [f"{name} (NamedTuple)", *(f"    {field}" for field in what._fields), *_methods(what)]
    if isinstance(what, type):
        return [f"{name} (class)", *_methods(what)]
    if inspect.ismodule(what):
        return [f"{name} (module)"]
    if callable(what):
        return [f"{name}{inspect.signature(what)}"]
    return [f"{name}: {type(what).__name__}"]


def _methods(kind: type) -> list[str]:
    found = []
    for name, member in sorted(vars(kind).items()):
        if name.startswith("_"):
            continue
        if inspect.isfunction(member):
            found.append(f"    {name}{inspect.signature(member)}")
        elif isinstance(member, property):
            found.append(f"    {name} (property)")
    return found


def snapshot() -> str:
    lines = []
    for module in (cspd_jax, image, text, masked):
        for name in sorted(module.__all__):
            lines += described(f"{module.__name__}.{name}", getattr(module, name))
    return "\n".join(line.replace("'", "") for line in lines) + "\n"


def main() -> int:
    if "--write" in sys.argv[1:]:
        FILE.write_text(snapshot(), encoding="utf-8")
        return 0
    before, now = FILE.read_text(encoding="utf-8").splitlines(), snapshot().splitlines()
    changes = list(difflib.unified_diff(before, now, "recorded", "now", lineterm="", n=0))
    print("\n".join(changes) or "the public names and signatures are those recorded")
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
