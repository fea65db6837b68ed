"""Hooks for models that a framework wraps: Accelerate, Fabric, Lightning, Transformers, Ray.

lightning and transformers, the modules, need the package of their name and are imported by themselves.
"""

from .comm_hook import CommHook

__all__ = ["CommHook"]
