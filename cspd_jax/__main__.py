"""`python -m cspd_jax`."""

import sys

from cspd_jax.cli import main

sys.exit(main())
