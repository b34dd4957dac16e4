"""The Inception network of FID: the names in the published PyTorch file, and the sizes
read from shapes.

The file is called `pt_inception-2015-12-05-6726825d.pth` by pytorch-fid and
`weights-inception-2015-12-05-6726825d.pth` by torch-fidelity; both are the same bytes.
"""

from __future__ import annotations

from cspd_jax.converters._tables import NO_ARGS, Args, Format, Options, Shapes, Table
from cspd_jax.networks.inception import InceptionConfig, abstract_params

# Of the published file. Its first eight digits are in the file's name.
PUBLISHED_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
_FIRST = 32  # channels of the published network's first layer

TABLE: Table = (
    (r"fc", r"fc"),
    (r"(.+)/bn/mean", r"\1.bn.running_mean"),
    (r"(.+)/bn/var", r"\1.bn.running_var"),
    (r"(.+)/(conv|bn)", r"\1.\2"),
)
# Nothing depends on how often a normalisation was trained, and not every file has it.
FORMAT = Format(TABLE, abstract_params, ignored=r"[\w.]+\.bn\.num_batches_tracked")


def make_config(
    shapes: Shapes, args: Args = NO_ARGS, options: Options = Options()
) -> InceptionConfig:
    """Takes everything from shapes."""
    first = shapes.size("Conv2d_1a_3x3.conv.weight", 0)
    return InceptionConfig(_FIRST // first, shapes.size("fc.weight", 0))
