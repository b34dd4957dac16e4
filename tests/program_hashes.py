"""Fingerprints of the programs that one call of every method compiles, names left out.

    python tests/program_hashes.py > before.json      # on one checkout
    python tests/program_hashes.py before.json        # on another: which differ

Where code only moves, the programs stay equal; where an algorithm changes, they need not.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import token_hashes

CANONICAL = (
    "image: plain",
    "image: plain, chains, no final noise",
    "image: self, groups, guided, prefill",
    "image: self, adaptive, chains",
    "image: draft, path, far, guided",
    "image: draft, paper, widened (lossy)",
    "image: released, groups, guided (lossy)",
    "image: MAR, plain, guided",
    "text: plain",
    "text: block, adaptive, confidence",
    "masked: stepwise, cached, sampled",
    "masked: ssd, sampled, guided",
)
_PLACE = re.compile(r" loc\([^()]*(?:\([^()]*\))*[^()]*\)")  # where it stands in the source
_NAME = re.compile(r"@[\w.$-]+|\bmhlo\.[a-z_]+ = [^,}]*|jax\.[a-z_]+ = \"[^\"]*\"")


def programs(case: str) -> list[str]:
    """The hashes of the modules that a case of `token_hashes.CASES` compiles, in lexical order."""
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(True):
        jax.clear_caches()
        jax.config.update("jax_dump_ir_to", folder)
        try:
            token_hashes.CASES[case]()
        finally:
            jax.config.update("jax_dump_ir_to", None)
        return sorted(_hash(path.read_text(encoding="utf-8")) for path in Path(folder).glob("*.mlir"))


def _hash(module: str) -> str:
    numbers: dict[str, str] = {}
    lines = (_PLACE.sub("", line) for line in module.splitlines() if not line.startswith("#loc"))
    nameless = _NAME.sub(lambda m: numbers.setdefault(m.group(), f"@{len(numbers)}"), "\n".join(lines))
    return hashlib.sha256(nameless.encode()).hexdigest()[:12]


def main() -> int:
    here = {case: programs(case) for case in CANONICAL}
    if len(sys.argv) < 2:
        print(json.dumps(here, indent=1))
        return 0
    before = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    differ = [case for case in here if here[case] != before.get(case)]
    for case in differ:
        common = len(set(here[case]) & set(before.get(case, [])))
        print(f"{case}: {common} of {len(here[case])} programs as before")
    print(f"{len(here) - len(differ)} of {len(here)} calls compile the programs of before")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
