"""Converts the Inception network of FID, by the names in the published PyTorch file and
sizes that are read from shapes.

pytorch-fid calls the file `pt_inception-2015-12-05-6726825d.pth`, and torch-fidelity
calls it `weights-inception-2015-12-05-6726825d.pth`. Both files have the same bytes.
"""

from __future__ import annotations

from cspd_jax.converters._tables import NO_ARGS, Args, Format, Options, Shapes, Table
from cspd_jax.networks.inception import InceptionConfig, abstract_params

# The SHA-256 of the published file. Its first eight digits are in the file's name.
PUBLISHED_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
_FIRST = 32  # channels of the published network's first layer

TABLE: Table = (
    (r"fc", r"fc"),
    (r"(.+)/bn/mean", r"\1.bn.running_mean"),
    (r"(.+)/bn/var", r"\1.bn.running_var"),
    (r"(.+)/(conv|bn)", r"\1.\2"),
)
# The number of training steps of a normalisation is not used, and not every file has
# it.
FORMAT = Format(TABLE, abstract_params, ignored=r"[\w.]+\.bn\.num_batches_tracked")


def make_config(
    shapes: Shapes, args: Args = NO_ARGS, options: Options = Options()
) -> InceptionConfig:
    """Makes the configuration from the shapes."""
    first = shapes.size("Conv2d_1a_3x3.conv.weight", 0)
    return InceptionConfig(_FIRST // first, shapes.size("fc.weight", 0))
