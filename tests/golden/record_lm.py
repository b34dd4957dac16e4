"""Records small language models of the transformers library and their logits, for tests without it.

    python tests/golden/record_lm.py    # writes lm_gpt_neox.zip, lm_llama.zip, lm_qwen2.zip beside itself

Each file holds, per case, the folder that `save_pretrained` writes (float16 weights) and `logits.npz`: token
ids and the logits that these weights give in float32.
"""

from __future__ import annotations

import copy
import io
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import lm_reference  # noqa: E402


def record(family: str) -> Path:
    out = HERE / f"lm_{family}.zip"
    with zipfile.ZipFile(out, "w") as archive, tempfile.TemporaryDirectory() as scratch:
        for case in lm_reference.CASES[family]:
            model = lm_reference.random_model(family, case)
            lm_reference.round_to_half(model)
            shards = {"max_shard_size": "20KB"} if family == "qwen2" and case == "untied" else {}
            folder = lm_reference.save(copy.deepcopy(model).half(), Path(scratch) / case, **shards)
            for file in sorted(folder.iterdir()):
                _add(archive, f"{case}/{file.name}", file.read_bytes())
            tokens = lm_reference.random_tokens()
            arrays = io.BytesIO()
            logits = lm_reference.logits(model, tokens)
            np.savez(arrays, tokens=tokens.astype(np.uint8), logits=logits)
            _add(archive, f"{case}/logits.npz", arrays.getvalue())
    return out


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """With a fixed date, so that the same models give the same file."""
    entry = zipfile.ZipInfo(name, (2025, 1, 1, 0, 0, 0))
    archive.writestr(entry, content, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    for family in lm_reference.CASES:
        path = record(family)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
