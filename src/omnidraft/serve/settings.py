"""What a server is told when it starts."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omnidraft.errors import OptionError
from omnidraft.learn.manifest import ProfileKey
from omnidraft.options import make_options

LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to serve.

    targets: the models that a request may name; the first is the default and loaded at once, the others when they are
    asked for. api_key: what requests must show; needed where the address is not a loopback one. slots: answers under
    way at once, each with KV caches of its own. queue: answers that may wait; more are told to come back. timeout:
    seconds of a request, waiting included. patience: seconds that a client may take to send a request, or to read
    what is ready for it. body_limit: bytes of a request. context_limit: tokens of a prompt and its answer, if fewer
    than the target's. part: prompt tokens fed in one turn. learn: when drafters learn, see
    `omnidraft.learn.settings.Learning`. profile: what they learn into where a request names none. profiles: how many
    stay open at once. options: fields of `omnidraft.Options` for every request.

    Raises:
        OptionError: a value outside its range, or an address that others reach without a key.
        ProfileError: what cannot be a profile's name.
    """

    targets: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    slots: int = 4
    queue: int = 64
    timeout: float = 600.0
    patience: float = 30.0
    body_limit: int = 4 << 20
    context_limit: int | None = None
    part: int = 256
    learn: str = "off"
    profile: str | None = None
    profiles: int = 4
    log_prompts: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.targets:
            raise OptionError("there is no target to serve; name one with --target")
        if not self.local and not self.api_key:
            raise OptionError(
                f"{self.host} can be reached by others; set an API key (--api-key), or use --host 127.0.0.1"
            )
        if not 0 <= self.port < 65536:
            raise OptionError(f"port is {self.port}; it must be in 0..65535 (0 takes any that is free)")
        for name, least in (("slots", 1), ("queue", 0), ("profiles", 1), ("part", 1), ("body_limit", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        if self.learn not in ("off", "between", "idle"):
            raise OptionError(f"unknown learn {self.learn!r}; use one of off, between, idle")
        if self.profile is not None:
            ProfileKey("drafter", "target", self.profile)
        make_options(**self.options)
        for name in ("timeout", "patience"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name} is {getattr(self, name)}; it must be seconds above 0")

    @property
    def default_profile(self) -> str | None:
        """Of a request that names none."""
        return self.profile or ("default" if self.learn != "off" else None)

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
