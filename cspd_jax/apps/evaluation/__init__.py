"""Evaluation of image models (right class, right distribution, no copies) and of language models."""

from cspd_jax.apps.evaluation.report import Settings, check, evaluate

__all__ = ["Settings", "check", "evaluate"]
