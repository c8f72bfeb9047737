"""A profile whose parts agree on one value, and a process that saves one after the other: for test_profile."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from omnidraft.learn.profile import Arrays, Document, Part, Profile, ProfileKey, ProfileStore

KEY = ProfileKey("org/drafter", "target", "default", "d" * 64, "t" * 64, "w" * 64)
SECRET = "what the user wrote"


def parts(value: int) -> dict[str, Part]:
    """A profile's parts, all of them different for different values."""
    weights = np.full((4, 8), value, np.float32)
    return {
        "adapter_model": Arrays({"lora_A": weights, "lora_B": weights.T}, {"format": "pt"}),
        "adapter_config": Document({"peft_type": "LORA", "r": 4 + value}),
        "optimiser": Arrays({"exp_avg": weights.astype(np.float16)}),
        "replay": Arrays({"bytes": np.frombuffer(f"{SECRET} {value}".encode(), np.uint8)}, text=True),
        "statistics": Document({"updates": value, "held_out": {"before": 0.31, "after": 0.42}}),
    }


def value_of(profile: Profile) -> int:
    """The value that all parts agree on."""
    value = profile.document("statistics")["updates"]
    assert set(profile.parts) == set(parts(0))
    assert profile.document("adapter_config")["r"] == 4 + value
    assert profile.metadata("adapter_model") == {"format": "pt"}
    adapter = profile.arrays("adapter_model")
    assert (adapter["lora_A"] == value).all()
    assert (adapter["lora_B"] == value).all()
    assert adapter["lora_B"].shape == (8, 4)
    assert (profile.arrays("optimiser")["exp_avg"] == value).all()
    assert profile.arrays("replay")["bytes"].tobytes() == f"{SECRET} {value}".encode()
    return int(value)


def saved_value(root: Path) -> int:
    """The value on disk, 0 for none; nothing may be wrong with it."""
    profile = ProfileStore(root).open(KEY)
    assert profile.problem is None, profile.problem
    return value_of(profile) if profile.version else 0


def save_on(root: Path, count: int) -> None:
    """Save value after value, and print each when it is saved."""
    store, value = ProfileStore(root), saved_value(root)
    print("ready", flush=True)
    for _ in range(count):
        value += 1
        store.save(KEY, parts(value))
        print(value, flush=True)


def die_everywhere(root: Path) -> None:
    """For each change that a save makes to the disk: die before it, by SIGKILL, and look what is left.

    Prints the number of changes at the end.
    """
    value, point = 0, 0
    while True:
        point += 1
        child = os.fork()
        if not child:
            _die_at(point)
            ProfileStore(root).save(KEY, parts(value + 1))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = saved_value(root)
        assert found in (value, value + 1), (point, found, value)
        value = found
        if not status:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    print(point - 1)


def _die_at(point: int) -> None:
    changes = {"os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir"}
    left = [point]

    def count(event: str, arguments: tuple[object, ...]) -> None:
        written = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if event in changes or written:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        save_on(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        die_everywhere(Path(sys.argv[1]))
