"""The target as a teacher: the engine writes text, and the model reads text into hidden states and distributions.

The entry point `outrider.teachers` names `load`.
"""

from target_service.distillation.teacher import load

__all__ = ["load"]
