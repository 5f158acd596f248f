"""The target as a teacher: it writes text by the engine, and reads text into hidden states and distributions.

`load` is what the entry point `outrider.teachers` names.
"""

from target_service.distillation.teacher import load

__all__ = ["load"]
