"""Durations for people."""


def duration(seconds: float) -> str:
    """In the unit that suits."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
