"""The code of docs/library.md runs, from top to bottom."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) >= 12
    names: dict = {"__name__": "library"}
    for number, block in enumerate(blocks, 1):
        # Nothing is kept on disk by the tests.
        code = re.sub(r"^jax\.config\.update\(.*$", "", block, flags=re.M)
        exec(compile(code, f"docs/library.md, block {number}", "exec"), names)


def test_every_file_that_the_docs_name_exists():
    root = PAGE.parent.parent
    pages = [*root.glob("*.md"), *root.glob("docs/*.md")]
    folders = (root, root / "cspd_jax", root / "tests", root / "docs", root / "benchmarks")
    pattern = re.compile(r"`([\w./*-]+\.(?:py|md|json|jsonl|txt|ipynb|toml))`|\]\(([\w./-]+)(?:#[\w-]+)?\)")
    made_by_users = {"report.json", "config.json", "evaluation.json", "tokenizer.json", "metrics.jsonl"}
    made_by_users |= {
        "held_out.jsonl",
        "settings.json",
        "manifest.json",
        "00000.json",
        "model.safetensors.index.json",
        "tokenizer_config.json",
        "generation_config.json",
        "NAME.json",
        "NAME.md",
    }
    missing = []
    for page in pages:
        for code, link in pattern.findall(page.read_text(encoding="utf-8")):
            name = code or link
            if name.split("/")[-1] in made_by_users or "://" in name:
                continue
            places = [page.parent] if link else folders
            if not any(
                list(place.glob(name)) if "*" in name else (place / name).exists() for place in places
            ):
                missing.append(f"{page.name}: {name}")
    assert not missing
