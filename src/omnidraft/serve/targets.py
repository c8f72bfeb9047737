"""The models that are served: loaded on demand, each with slots that keep the KV caches of conversations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from omnidraft.engine import OmniDraft
from omnidraft.serve.counters import Counters
from omnidraft.serve.errors import ApiError

_WORTH = 32  # tokens: for fewer in common no other conversation's KV cache is given up


class Slot:
    """An OmniDraft for one answer at a time."""

    def __init__(self, model: OmniDraft) -> None:
        self.model = model
        self.busy = False
        self.used = 0  # when, in answers begun


class Target:
    """A loaded target. Only the worker touches its slots."""

    def __init__(self, name: str, model: OmniDraft) -> None:
        self.name = name
        self.model = model
        self.counters = Counters(model)
        self.slots: list[Slot] = []
        self._begun = 0

    def take(self, prompt: Sequence[int], limit: int) -> Slot:
        """A slot for a prompt: that of its own conversation, else a new one (up to `limit`), else the longest unused.

        There must be a free one, or fewer than `limit`.
        """
        self._begun += 1
        free = [slot for slot in self.slots if not slot.busy]
        if len(self.slots) < limit:
            free.append(Slot(self.model))  # stands for one that is made if it is chosen
        slot = max(free, key=lambda slot: (_held(slot, self.model, prompt) // _WORTH, -slot.used))
        if slot.model is self.model:
            slot.model = self.model.fork()
            self.slots.append(slot)
        slot.busy, slot.used = True, self._begun
        return slot


def _held(slot: Slot, base: OmniDraft, prompt: Sequence[int]) -> int:
    return 0 if slot.model is base else slot.model.cached(prompt)


class Targets:
    """All that may be asked for by name. `load` runs in whichever thread asks first; others wait for it."""

    def __init__(self, names: Sequence[str], load: Callable[[str], OmniDraft]) -> None:
        self.names = tuple(names)
        self._load = load
        self._loaded: dict[str, Target] = {}
        self._lock = threading.Lock()

    def find(self, name: str) -> Target | None:
        """The target of that name, the first one for an empty name; None if it is not loaded yet.

        Raises:
            ApiError: there is none of that name (404).
        """
        name = name or self.names[0]
        if name not in self.names:
            known = ", ".join(self.names)
            message = f"there is no model {name!r} here; there are {known}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return self._loaded.get(name)

    def get(self, name: str) -> Target:
        """The same, loaded if it was not, which may take long.

        Raises:
            ApiError: as `find`.
            OmniDraftError: it cannot be loaded.
        """
        name = name or self.names[0]
        with self._lock:
            if self.find(name) is None:
                self._loaded[name] = Target(name, self._load(name))
            return self._loaded[name]

    @property
    def loaded(self) -> list[Target]:
        """Those in memory."""
        return list(self._loaded.values())
