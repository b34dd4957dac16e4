"""Which packages there are; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["cspd_jax", "cspd_jax.*"]),
        "cspd_jax.converters",
    ],
    # `converters/` stands at the top of the repository but is installed inside the
    # package, so that no bare `converters` lands among a user's packages.
    package_dir={"cspd_jax": "cspd_jax", "cspd_jax.converters": "converters"},
)
