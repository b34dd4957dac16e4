"""The modules of the package, how large they are, and who imports whom.

    python tests/import_graph.py            # files, median and largest, rooms, floors
    python tests/import_graph.py OTHER      # of another checkout

A floor is a step of the longest chain of imports that run when a module is imported (imports under
TYPE_CHECKING and inside functions do not).
"""

from __future__ import annotations

import ast
import functools
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Name -> file; `converters/` is installed inside the package."""
    files = [(root, p) for p in (root / "cspd_jax").rglob("*.py")]
    files += [(root, p) for p in (root / "converters").rglob("*.py")]
    found = {}
    for top, path in files:
        parts = path.relative_to(top).with_suffix("").parts
        parts = ("cspd_jax", *parts) if parts[0] == "converters" else parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path], *, late: bool = False, types: bool = False) -> set[str]:
    """The modules of the package that a file imports; `late`: inside functions too; `types`: under
    TYPE_CHECKING too."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if not late and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                name = inside if inside in known else node.module
                if name in known:
                    found.add(name)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def graph(root: Path = ROOT, *, late: bool = False, types: bool = False) -> dict[str, set[str]]:
    known = modules(root)
    return {name: imports(path, known, late=late, types=types) - {name} for name, path in known.items()}


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of a cycle; empty if there is none."""
    state: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> list[str]:
        state[name] = 1
        stack.append(name)
        for other in sorted(edges[name]):
            if state.get(other) == 1:
                return stack[stack.index(other) :]
            if other not in state and (found := visit(other)):
                return found
        stack.pop()
        state[name] = 2
        return []

    for name in edges:
        if name not in state and (found := visit(name)):
            return found
    return []


def longest_chain(edges: dict[str, set[str]]) -> list[str]:
    @functools.cache
    def below(name: str) -> tuple[str, ...]:
        return (name, *max((below(other) for other in edges[name]), key=len, default=()))

    return list(max((below(name) for name in edges), key=len))


def main() -> None:
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    files = modules(root)
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    real = {name: n for name, n in lines.items() if files[name].name != "__init__.py"}
    largest = max(real, key=real.get)
    packages = [name for name, path in files.items() if path.name == "__init__.py"]
    print(f"files: {len(files)}, {len(packages)} of them __init__.py")
    print(f"median module: {statistics.median(real.values()):.0f} lines; largest: {largest}, {real[largest]}")
    print(f"rooms: {len({name.split('.')[1] for name in packages if '.' in name})}")
    edges = graph(root)
    if found := cycle(edges):
        print("cycle:", " -> ".join(found))
        return
    chain = longest_chain(edges)
    print(f"floors: {len(chain)}: {' -> '.join(chain)}")


if __name__ == "__main__":
    main()
