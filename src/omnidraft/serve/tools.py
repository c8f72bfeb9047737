"""Tool calls in an answer's text, as Qwen and Hermes write them.

<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

_OPEN = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>\s*|$)", re.S)


class ToolReader:
    """Lets an answer's text through until a call may have begun; what follows is read when the answer ends."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """More of the answer; what of it is certainly no call."""
        self._held += text
        start = self._held.find(_OPEN)
        if start < 0:
            start = len(self._held) - _begins(self._held)
        shown, self._held = self._held[:start], self._held[start:]
        return shown

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the text, and the calls. What is no valid call stays text."""
        calls: list[dict[str, Any]] = []

        def take(found: re.Match[str]) -> str:
            try:
                call = json.loads(found[1])
                name, arguments = call["name"], call.get("arguments", {})
                # Some models write them as JSON in a string, as the API does.
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
            except (ValueError, KeyError, TypeError):
                return found[0]
            calls.append(
                {
                    "id": f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {"name": str(name), "arguments": arguments},
                }
            )
            return ""

        return _CALL.sub(take, self._held), calls


def _begins(text: str) -> int:
    """Length of the longest end of `text` that a call may begin with."""
    return next((n for n in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:n])), 0)
