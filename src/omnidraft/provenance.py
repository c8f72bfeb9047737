"""A birth certificate for every number: what command, code, versions and machine made it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("omnidraft", "torch", "transformers", "tokenizers", "numpy")


def provenance() -> dict[str, Any]:
    """argv, time, git revision of the code, versions of what it stands on, and the machine."""
    return {
        "argv": [Path(sys.argv[0]).name, *map(_without_folder, sys.argv[1:])],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _git_revision(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "machine": _machine(),
    }


def _without_folder(argument: str) -> str:
    """A path's name alone: where files lay says nothing of a result. A hub id is no path."""
    return Path(argument).name if argument.startswith(("/", ".", "~")) else argument


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The revision this code was checked out at, marked when it has been changed; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        cpu = names[0] if names else cpu
    machine: dict[str, Any] = {"system": platform.system(), "cpu": cpu, "cores": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None:
        machine["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            machine["gpu"] = torch.cuda.get_device_name()
    return machine
