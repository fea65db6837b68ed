"""Training with rare exchanges: LocalSteps."""

from .steps import LocalSteps

__all__ = ["LocalSteps"]
