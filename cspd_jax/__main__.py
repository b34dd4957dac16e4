"""`python -m cspd_jax`."""

from cspd_jax.cli import command

command()
