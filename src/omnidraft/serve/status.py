"""What the dashboard shows, as one JSON document (docs/serving.md says what each field means)."""

from __future__ import annotations

import dataclasses
from typing import Any

from omnidraft import __version__
from omnidraft.serve.server import Server


def status_of(server: Server) -> dict[str, Any]:
    """The document."""
    settings, loaded = server.settings, {target.name: target for target in server.targets.loaded}
    drafter = next((target.model.drafter for target in loaded.values() if target.model.drafter), None)
    return {
        "version": __version__,
        "targets": [
            {"name": name, "loaded": name in loaded}
            | (
                {
                    "engine": dataclasses.asdict(loaded[name].model.target.engine),
                    "context_length": loaded[name].model.target.context_length,
                    "counters": loaded[name].counters.as_dict(),
                    "ngrams": loaded[name].counters.ngrams_as_dict(),
                }
                if name in loaded
                else {}
            )
            for name in server.targets.names
        ],
        "drafter": {"name": drafter.name, "engine": dataclasses.asdict(drafter.engine)} if drafter else None,
        "requests": {"running": server.worker.running, "waiting": server.worker.waiting},
        "settings": {
            "slots": settings.slots,
            "queue": settings.queue,
            "timeout": settings.timeout,
            "context_limit": settings.context_limit,
            "options": dict(settings.options),
        },
        "learning": {"mode": settings.learn, "default_profile": settings.default_profile},
        "profiles": server.profiles.as_dicts(),
    }
