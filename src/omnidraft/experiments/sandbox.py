"""Running a program that a model wrote: in a process of its own, with limits, in a folder that is thrown away.

The limits keep a mistake from doing harm; they are no prison for code that means harm.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

_SECONDS = 10  # of wall time; of processor time half as much
_MEMORY = 1 << 30  # bytes
_LIMITS = f"""
import resource
resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS // 2}, {_SECONDS // 2}))
resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY}, {_MEMORY}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
import socket
def _closed(*given, **named):
    raise PermissionError("no network in here")
socket.socket = socket.create_connection = _closed
"""


def passes(program: str) -> bool:
    """Whether the program ends by itself, in time, and without an error. POSIX only."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _LIMITS + program],
                cwd=folder,
                env={"PATH": os.defpath},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0
