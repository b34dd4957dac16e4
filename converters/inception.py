"""The Inception network of FID: the names in the published PyTorch file, and the sizes read from shapes.

The file is called `pt_inception-2015-12-05-6726825d.pth` by pytorch-fid and
`weights-inception-2015-12-05-6726825d.pth` by torch-fidelity; both are the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cspd_jax.converters._tables import Format, Shape, Shapes, Table
from cspd_jax.errors import UserError, naming
from cspd_jax.networks.inception import InceptionConfig, abstract_params

# Of the published file. Its first eight digits are in the file's name.
PUBLISHED_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
_FIRST = 32  # channels of the published network's first layer
# How often a normalisation was trained; nothing depends on it, and not every file has it.
_IGNORED = re.compile(r"[\w.]+\.bn\.num_batches_tracked")

TABLE: Table = (
    (r"fc", r"fc"),
    (r"(.+)/bn/mean", r"\1.bn.running_mean"),
    (r"(.+)/bn/var", r"\1.bn.running_var"),
    (r"(.+)/(conv|bn)", r"\1.\2"),
)


class _Format(Format):
    def parameters(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: value for name, value in named.items() if not _IGNORED.fullmatch(name)}


FORMAT = _Format(TABLE, abstract_params)


def make_config(shapes: Mapping[str, Shape], where: str) -> InceptionConfig:
    """The configuration, from shapes."""
    s = Shapes(shapes, where)
    first = s.size("Conv2d_1a_3x3.conv.weight", 0, 4)
    if _FIRST % first:
        raise UserError(
            f"{where} does not fit the network: the first layer of the Inception network of FID has {_FIRST}"
            f" channels, and not {first}"
        )
    with naming(where):
        return InceptionConfig(_FIRST // first, s.size("fc.weight", 0, 2))
