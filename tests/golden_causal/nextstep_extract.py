"""Keeps what the tests use of the numbers recorded from NextStep-1's published PyTorch
code.

    # Of nextstep_tiny.npz, .safetensors and .json as they were recorded.
    python nextstep_extract.py DIR

The recording: stepfun-ai/NextStep-1 (Apache-2.0) at commit 6e49bae, on a CPU in
float32, random weights, every random draw injected. Left out are most runs whose noise
prompts share, the parts of which generations are made, image editing, and training.
"""

import re
import shutil
import sys
from pathlib import Path

import numpy as np

KEPT = (
    r"gen/(cfg1|cfg3|cfg3_linear_norm|cfg3_repeat1|cfg3_pos_norm_shift)/"
    r"(input_ids|attention_mask|settings|noise|tokens|c)"
)

if __name__ == "__main__":
    source = Path(sys.argv[1])
    here = Path(__file__).parent
    recorded = np.load(source / "nextstep_tiny.npz")
    kept = {name: recorded[name] for name in recorded.files if re.fullmatch(KEPT, name)}
    np.savez_compressed(here / "nextstep_tiny.npz", **kept)
    for name in ("nextstep_tiny.safetensors", "nextstep_tiny.json"):
        shutil.copyfile(source / name, here / name)
