"""What the pages name exists. That what they print runs: test_printed.py."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_file_that_the_docs_name_exists():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    folders = (ROOT, ROOT / "cspd_jax", ROOT / "tests", ROOT / "docs", ROOT / "benchmarks")
    pattern = re.compile(r"`([\w./*-]+\.(?:py|md|json|jsonl|txt|ipynb|toml))`|\]\(([\w./-]+)(?:#[\w-]+)?\)")
    made_by_users = {"report.json", "config.json", "evaluation.json", "tokenizer.json", "metrics.jsonl"}
    made_by_users |= {
        "held_out.jsonl",
        "questions.txt",
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
