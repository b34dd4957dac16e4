"""The numbers of the paper, "Continuous Speculative Decoding for Autoregressive Image Generation" (arXiv
2411.11925), for 256 x 256 ImageNet and 256 tokens on one NVIDIA A100.

The paper itself was not at hand. Its tables 1 to 4 are as public pages about the paper give them; the row
of MAR-H with MAR-B at batch 256 was known from elsewhere, and agrees. Figures are plots: their values were
not at hand, but for what is said in `TRIES`.
"""

from __future__ import annotations

# (target, draft, gamma) -> acceptance, and speed-up at batch 1, 8, 128, 256.
TABLE1: dict[tuple[str, str, int], tuple[float, dict[int, float]]] = {
    ("MAR-L", "MAR-B", 32): (0.26, {1: 1.18, 8: 1.21, 128: 1.44, 256: 1.49}),
    ("MAR-L", "MAR-B", 16): (0.31, {1: 1.10, 8: 1.17, 128: 1.39, 256: 1.42}),
    ("MAR-L", "MAR-B", 8): (0.36, {1: 1.05, 8: 1.12, 128: 1.29, 256: 1.32}),
    ("MAR-L", "MAR-B", 4): (0.39, {1: 1.01, 8: 1.00, 128: 1.13, 256: 1.15}),
    ("MAR-H", "MAR-B", 32): (0.19, {1: 1.44, 8: 1.61, 128: 2.17, 256: 2.33}),
    ("MAR-H", "MAR-L", 32): (0.18, {1: 1.26, 8: 1.34, 128: 1.47, 256: 1.53}),
    ("MAR-H", "MAR-B", 16): (0.26, {1: 1.37, 8: 1.51, 128: 2.07, 256: 2.20}),
    ("MAR-H", "MAR-L", 16): (0.24, {1: 1.24, 8: 1.29, 128: 1.41, 256: 1.46}),
    ("MAR-H", "MAR-B", 8): (0.27, {1: 1.26, 8: 1.44, 128: 1.88, 256: 1.96}),
    ("MAR-H", "MAR-L", 8): (0.28, {1: 1.11, 8: 1.21, 128: 1.32, 256: 1.33}),
    ("MAR-H", "MAR-B", 4): (0.30, {1: 1.11, 8: 1.20, 128: 1.56, 256: 1.62}),
    ("MAR-H", "MAR-L", 4): (0.30, {1: 1.00, 8: 1.03, 128: 1.15, 256: 1.18}),
}

# (what, FID and IS without guidance, FID and IS with guidance)
TABLE2: tuple[tuple[str, str, str, str, str], ...] = (
    ("MAR-L alone", "2.60", "221.4", "1.78", "296.0"),
    ("MAR-L, draft MAR-B", "2.59 ± 0.04", "218.4 ± 3.4", "1.81 ± 0.05", "303.7 ± 4.3"),
    ("MAR-H alone", "2.35", "227.8", "1.55", "303.7"),
    ("MAR-H, draft MAR-B", "2.36 ± 0.05", "228.5 ± 2.2", "1.60 ± 0.05", "301.6 ± 2.6"),
    ("MAR-H, draft MAR-L", "2.34 ± 0.04", "228.9 ± 2.8", "1.57 ± 0.04", "301.4 ± 2.5"),
)

# (target, draft, gamma) -> acceptance without and with alignment.
TABLE3: dict[tuple[str, str, int], tuple[float, float]] = {
    ("MAR-L", "MAR-B", 32): (0.10, 0.34),
    ("MAR-L", "MAR-B", 16): (0.12, 0.37),
    ("MAR-L", "MAR-B", 8): (0.12, 0.39),
    ("MAR-L", "MAR-B", 4): (0.13, 0.37),
    ("MAR-H", "MAR-B", 32): (0.07, 0.30),
    ("MAR-H", "MAR-L", 32): (0.06, 0.33),
    ("MAR-H", "MAR-B", 16): (0.07, 0.33),
    ("MAR-H", "MAR-L", 16): (0.08, 0.35),
    ("MAR-H", "MAR-B", 8): (0.13, 0.31),
    ("MAR-H", "MAR-L", 8): (0.12, 0.34),
    ("MAR-H", "MAR-B", 4): (0.14, 0.32),
    ("MAR-H", "MAR-L", 4): (0.12, 0.34),
}

PREFILL = (0.0, 0.05, 0.15)
# (target, draft, gamma) -> (acceptance, speed-up) at each share of PREFILL.
TABLE4: dict[tuple[str, str, int], tuple[tuple[float, float], ...]] = {
    ("MAR-L", "MAR-B", 32): ((0.27, 1.24), (0.34, 1.22), (0.37, 1.21)),
    ("MAR-L", "MAR-B", 16): ((0.35, 1.19), (0.37, 1.19), (0.38, 1.17)),
    ("MAR-L", "MAR-B", 8): ((0.35, 1.14), (0.39, 1.13), (0.39, 1.12)),
    ("MAR-L", "MAR-B", 4): ((0.32, 1.04), (0.37, 1.02), (0.39, 1.00)),
    ("MAR-H", "MAR-B", 32): ((0.25, 1.63), (0.30, 1.63), (0.33, 1.61)),
    ("MAR-H", "MAR-L", 32): ((0.24, 1.36), (0.33, 1.35), (0.32, 1.34)),
    ("MAR-H", "MAR-B", 16): ((0.32, 1.53), (0.33, 1.52), (0.34, 1.51)),
    ("MAR-H", "MAR-L", 16): ((0.34, 1.32), (0.35, 1.29), (0.35, 1.29)),
    ("MAR-H", "MAR-B", 8): ((0.33, 1.47), (0.31, 1.47), (0.34, 1.44)),
    ("MAR-H", "MAR-L", 8): ((0.34, 1.21), (0.34, 1.21), (0.35, 1.21)),
    ("MAR-H", "MAR-B", 4): ((0.31, 1.21), (0.32, 1.21), (0.34, 1.20)),
    ("MAR-H", "MAR-L", 4): ((0.31, 1.05), (0.34, 1.03), (0.34, 1.03)),
}

COST = 0.38  # c of MAR-B as a share of MAR-H: the seconds of a drafted AR step by those of a target's
TRIES = "2 to 3"  # draws until one is taken, of figure 15

LARGEST = ("MAR-H", "MAR-B")  # the pair with the largest gain


def acceptance(gamma: int) -> float | None:
    """Of the pair with the largest gain, in table 1."""
    found = TABLE1.get((*LARGEST, gamma))
    return None if found is None else found[0]


def speedup(gamma: int, batch: int) -> float | None:
    """Of the pair with the largest gain, in table 1."""
    found = TABLE1.get((*LARGEST, gamma))
    return None if found is None else found[1].get(batch)
