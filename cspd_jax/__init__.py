"""Speculative decoding in JAX that does not change the distribution of the output.

Images: `load`, `generate`, `to_images`, `picture`. Language models: the modules `text`
and `masked`. `fastest` and `compare` take every family. `audit` tests samplers of any
library.
"""

import pathlib
import signal
import sys

# Until the command line can say so in one line, Ctrl-C ends its process without a word.
if sys.argv[0].endswith("cspd-jax"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

__version__ = "0.8.0.dev0"

# In a checkout `converters/` lies beside this folder. In an installed package it lies
# inside this folder.
_ROOT = pathlib.Path(__file__).parent.parent
if (_ROOT / "converters" / "source.py").is_file() and not (
    _ROOT / "cspd_jax" / "converters"
).exists():
    __path__.append(str(_ROOT))

from cspd_jax import audit, image, masked, parallel, text
from cspd_jax._utils.compilation import DEVICE_LOOPS, device_loops
from cspd_jax.check import UserError
from cspd_jax.comparison import compare, fastest
from cspd_jax.hub import load
from cspd_jax.image.chain import ChainSpeculation
from cspd_jax.image.criterion import PathCriterion
from cspd_jax.image.generation import generate, stream
from cspd_jax.image.known import Known
from cspd_jax.image.methods import DraftSpeculation, Plain, SelfSpeculation
from cspd_jax.image.options import Options
from cspd_jax.image.paper import PaperCriterion
from cspd_jax.image.pixels import to_images
from cspd_jax.keys import row_keys
from cspd_jax.reports.citation import citation
from cspd_jax.reports.pictures import picture

__all__ = [
    "DEVICE_LOOPS",
    "ChainSpeculation",
    "DraftSpeculation",
    "Known",
    "Options",
    "PaperCriterion",
    "PathCriterion",
    "Plain",
    "SelfSpeculation",
    "UserError",
    "__version__",
    "audit",
    "citation",
    "compare",
    "device_loops",
    "fastest",
    "generate",
    "image",
    "load",
    "masked",
    "parallel",
    "picture",
    "row_keys",
    "stream",
    "text",
    "to_images",
]
