"""How good a model's images are: right classes, right distribution, and no copies of training images."""

from cspd_jax.evaluation.report import Settings, check, evaluate

__all__ = ["Settings", "check", "evaluate"]
