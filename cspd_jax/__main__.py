"""`python -m cspd_jax`."""

from cspd_jax.apps.cli import command

command()
