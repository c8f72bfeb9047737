"""Who learns what: the profiles that requests name, opened on demand, and forgotten on request."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from omnidraft.errors import ProfileError
from omnidraft.learn.profile import ProfileKey, ProfileStore
from omnidraft.serve.errors import ApiError
from omnidraft.serve.settings import Settings
from omnidraft.serve.targets import Target, Targets

if TYPE_CHECKING:
    from omnidraft.learn.learner import Learner

_log = logging.getLogger(__name__)
_CURVE = 500  # looks at held-out answers kept
_MOST = 1000  # profiles on disk: any client may name another

Key = tuple[str, str]  # target, profile


class Profiles:
    """The profiles in memory. Only the worker opens and closes them."""

    def __init__(self, settings: Settings, targets: Targets, store: ProfileStore | None = None) -> None:
        self.when = settings.learn
        self.default = settings.default_profile
        self.curves: dict[Key, deque[dict[str, float]]] = {}
        self._limit = settings.profiles
        self._targets = targets
        self._store = store or ProfileStore()
        self._open: dict[Key, Learner] = {}  # least recently used first
        self._held = contextlib.ExitStack()
        self._holding = False

    def named(self, target: Target, header: str | None, user: str | None) -> str | None:
        """The profile of a request; None for none. A drafter that cannot be adapted has none.

        A `user` names one only where the server learns: to OpenAI's clients it may be any text, and is no wish.

        Raises:
            ApiError: a header names one, and there can be none (400).
            ProfileError: what cannot be a profile's name.
        """
        if not hasattr(target.model.drafter, "adapted"):
            if header:
                raise ApiError(400, "the drafter of this server cannot be adapted; leave the profile out")
            return None
        name = header or (user if self.when != "off" else None) or self.default
        if name:
            ProfileKey("drafter", target.name, name)
        return name

    def open(self, target: Target, name: str | None, in_use: Collection[Key]) -> Learner | None:
        """The learner of a profile; others that are not in use are closed when there are too many.

        Raises:
            ApiError: there are too many (400).
            ProfileError: it cannot be read, or another process holds it.
            OptionError: the extra for learning is missing.
        """
        if name is None:
            return None
        key = (target.name, name)
        learner = self._open.pop(key, None)
        if learner is None:
            names = [(info.key.target, info.key.name) for info in self.listed()]
            if len(names) >= _MOST and key not in names:
                raise ApiError(400, f"there are {_MOST} profiles; delete one, or choose one of them")
            too_many = max(0, len(self._open) + 1 - self._limit)
            for old in [key for key in self._open if key not in in_use][:too_many]:
                self._close(old)
            learner = target.model.learn(self.when, profile=name, store=self._store)
            learner.on_update = self._curve(key, learner)
            if self._holding:
                self._held.enter_context(learner.waiting())
        self._open[key] = learner
        return learner

    def _curve(self, key: Key, learner: Learner) -> Callable[[Any], None]:
        curve = self.curves.setdefault(key, deque(maxlen=_CURVE))

        def look(update: Any) -> None:
            agreement = learner.agreement
            if agreement is not None and (not curve or curve[-1]["agreement"] != agreement):
                curve.append({"updates": learner.account.updates, "agreement": agreement})

        return look

    def _close(self, key: Key) -> None:
        target, name = key
        del self._open[key]
        try:
            self._targets.get(target).model.release(name)
        except ProfileError as error:  # who asks for another profile, or wants this one gone, is not to blame
            _log.warning("%s", error)

    def hold(self) -> None:
        """Answers are under way: learning in the background waits."""
        self._holding = True
        for learner in self._open.values():
            self._held.enter_context(learner.waiting())

    def let_go(self) -> None:
        """No answer is under way."""
        self._holding = False
        self._held.close()

    def forget(self, name: str) -> int:
        """Delete all that a profile learned, for every target, in memory and on disk. Returns how many there were.

        Raises:
            ProfileError: another process holds it.
        """
        keys = [key for key in self._open if key[1] == name]
        for key in keys:
            self._close(key)
            self.curves.pop(key, None)
        for target in self._targets.loaded:
            for slot in target.slots:
                if not slot.busy:  # its KV cache may hold what was asked
                    slot.model.follow(None)
                    slot.model.reset()
        found = [info for info in self.listed() if info.key.name == name]
        for info in found:
            self._store.remove(info.key)
        return len(found)

    def listed(self) -> list[Any]:
        """What is on disk for the targets of this server and its drafter, as `ProfileInfo`s."""
        drafters = {target.model.drafter.name for target in self._targets.loaded if target.model.drafter}
        names = self._targets.names
        return [i for i in self._store.profiles() if i.key.drafter in drafters and i.key.target in names]

    def as_dicts(self) -> list[dict[str, Any]]:
        """The JSON form of all profiles, on disk or in memory."""
        found: dict[Key, dict[str, Any]] = {
            (info.key.target, info.key.name): {
                "name": info.key.name,
                "target": info.key.target,
                "saved": info.manifest.saved,
                "bytes": info.size,
                "open": False,
            }
            for info in self.listed()
        }
        for (target, name), learner in list(self._open.items()):
            entry = found.setdefault(
                (target, name), {"name": name, "target": target, "saved": None, "bytes": 0}
            )
            account = learner.account
            entry |= {
                "open": True,
                "answers": account.answers,
                "updates": account.updates,
                "reverted": account.reverted,
                "loss": account.loss,
                "problem": learner.problem,
                "curve": list(self.curves.get((target, name), ())),
            }
        return list(found.values())

    @property
    def learners(self) -> dict[Key, Learner]:
        """Those in memory."""
        return dict(self._open)
