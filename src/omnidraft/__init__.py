"""One small drafter makes any local language model answer faster, losslessly.

>>> import omnidraft
>>> model = omnidraft.load(target="qwen2.5-coder-0.5b")
>>> print(model.generate("Write a haiku about rivers."))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from omnidraft.errors import OmniDraftError

if TYPE_CHECKING:
    from omnidraft.answers import Answer, Stream
    from omnidraft.backends.custom_generate import custom_generate
    from omnidraft.engine import OmniDraft
    from omnidraft.loading import load, load_model
    from omnidraft.options import Options
    from omnidraft.sampling import Sampling
    from omnidraft.stats import Stats
    from omnidraft.types import Step

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "OmniDraft",
    "OmniDraftError",
    "Options",
    "Sampling",
    "Stats",
    "Step",
    "Stream",
    "custom_generate",
    "load",
    "load_model",
]

_HOME = {
    "Answer": "answers",
    "OmniDraft": "engine",
    "Options": "options",
    "Stream": "answers",
    "custom_generate": "backends.custom_generate",
    "load": "loading",
    "load_model": "loading",
    "Sampling": "sampling",
    "Stats": "stats",
    "Step": "types",
}


def __getattr__(name: str) -> Any:
    """Public names come from their modules on first use, so that importing the package stays instant."""
    if name not in _HOME:
        raise AttributeError(f"module 'omnidraft' has no attribute {name!r}")
    return getattr(import_module(f"omnidraft.{_HOME[name]}"), name)
