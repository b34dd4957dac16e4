"""Where a parameter is cut along the model axis, by its name.

A block is cut so that its two products need one sum over the devices: the first along its outputs
(attention heads, the width of the MLP), the second along its inputs. Matrices whose outputs are told apart
later (queries, keys and values in one; shifts, scales and gates in one) are cut along their inputs, and so
are the tables of a vocabulary, whose ids have padding: the sum then gives every device all of what comes
out. A cut through the middle of something would have neighbours exchange pieces, for which all groups of
devices would have to wait. What is small, or what no rule names, is whole everywhere.
"""

from __future__ import annotations

import re
from typing import Any

from jax.sharding import PartitionSpec

from cspd_jax.parallel.mesh import MODEL

_INPUTS, _OUTPUTS, _FEATURES = 0, 1, 1

# (the end of a parameter's path, the axis that is cut)
_HEADS = (
    (r"attention/[qkv]/kernel", _OUTPUTS),
    (r"attention/[qkv]/bias", 0),
)
_WITHOUT_HEADS = ((r"attention/[qkv]/kernel", _INPUTS),)
_RULES = (
    # Language models.
    (r"attention/out/kernel", _INPUTS),
    (r"mlp/(up|gate)/kernel", _OUTPUTS),
    (r"mlp/(up|gate)/bias", 0),
    (r"mlp/down/kernel", _INPUTS),
    (r"embed/embedding", _FEATURES),
    (r"head/kernel", _INPUTS),
    (r"image_out_projector/kernel", _INPUTS),
    # MAR.
    (r"attn/(qkv|proj)/kernel", _INPUTS),
    (r"mlp/fc1/kernel", _OUTPUTS),
    (r"mlp/fc1/bias", 0),
    (r"mlp/fc2/kernel", _INPUTS),
    (r"res_blocks_\d+/mlp_0/kernel", _OUTPUTS),
    (r"res_blocks_\d+/mlp_0/bias", 0),
    (r"res_blocks_\d+/mlp_2/kernel", _INPUTS),
    (r"res_blocks_\d+/adaLN_modulation_1/kernel", _INPUTS),
)


def partition(path: str, shape: tuple[int, ...], devices: int, config: Any = None) -> PartitionSpec:
    """How the parameter at `path` ("layers_0/mlp/up/kernel") is cut for so many devices of the model axis.

    config: of the network; a language model's heads are shared out only if their number can be.
    """
    kv_heads = getattr(config, "kv_heads", 0)
    for pattern, axis in (*(_WITHOUT_HEADS if kv_heads % devices else _HEADS), *_RULES):
        if re.fullmatch(rf"(.*/)?{pattern}", path) and devices > 1 and shape[axis] % devices == 0:
            return PartitionSpec(*[None] * axis, MODEL)
    return PartitionSpec()
