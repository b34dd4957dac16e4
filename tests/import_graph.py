"""The modules of the package, and who imports whom."""

from __future__ import annotations

import ast
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
