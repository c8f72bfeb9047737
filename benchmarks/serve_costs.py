"""What serving costs: tokens a second over HTTP against the library, and the first token behind a known prefix or not.

    python benchmarks/serve_costs.py --target qwen2.5-coder-0.5b --json results/serve_costs.json

The same answers are made by the library and over HTTP (server-sent events, one client in a process of its own), in
turns in one process with the same models, to prompts of which the KV caches know nothing. The share that HTTP costs is
measured within each request as well: what it took beyond its own steps, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from serve_load import WORDS

import omnidraft
from omnidraft.engine import OmniDraft
from omnidraft.provenance import provenance
from omnidraft.serve.app import listen, web_server
from omnidraft.serve.server import Server
from omnidraft.serve.settings import Settings

# What the client runs: requests as lines in, (first, last, tokens, seconds in steps) as lines out.
CLIENT = """
import json, sys, time
from http.client import HTTPConnection
connection = HTTPConnection("127.0.0.1", int(sys.argv[1]))
for line in sys.stdin:
    start, first, usage = time.perf_counter(), None, None
    connection.request("POST", "/v1/chat/completions", line.encode(), {"Content-Type": "application/json"})
    for event in connection.getresponse():
        if first is None and b'"content"' in event:
            first = time.perf_counter() - start
        if b'"usage"' in event:
            usage = json.loads(event[6:])["usage"]
    last = time.perf_counter() - start
    print(json.dumps([first, last, usage["completion_tokens"], usage["omnidraft"]["seconds"]]), flush=True)
"""


class Client:
    """A process that asks."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-c", CLIENT, str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, messages: list[dict[str, str]], tokens: int) -> tuple[float, float, int, float]:
        """Seconds to the first and the last token, tokens, and the seconds that the steps took."""
        assert self._process.stdin
        assert self._process.stdout
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        print(json.dumps(body), file=self._process.stdin, flush=True)
        first, last, count, seconds = json.loads(self._process.stdout.readline())
        return first, last, count, seconds

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def text(generator: random.Random, words: int) -> str:
    return " ".join(generator.choices(WORDS, k=words))


def overhead(model: OmniDraft, client: Client, rounds: int, tokens: int, seed: int) -> dict[str, Any]:
    """Tokens a second of the library and over HTTP, in turns."""
    generator = random.Random(seed)
    ratios, beyond, library, served = [], [], [], []
    for i in range(rounds):
        prompt = [{"role": "user", "content": f"{i} Tell me more: {text(generator, 20)}"}]

        def alone(prompt: list[dict[str, str]] = prompt) -> None:
            model.reset()
            start = time.perf_counter()
            answer = model.generate(prompt, max_tokens=tokens)
            library.append(len(answer.tokens) / (time.perf_counter() - start))

        def over_http(prompt: list[dict[str, str]] = prompt) -> None:
            _, last, count, seconds = client.ask(prompt, tokens)
            served.append(count / last)
            beyond.append((last - seconds) / last)

        for one in (alone, over_http) if i % 2 else (over_http, alone):
            one()
        ratios.append(served[-1] / library[-1])
    return {
        "rounds": rounds,
        "tokens": tokens,
        "library_tokens_per_second": median(library),
        "http_tokens_per_second": median(served),
        "http_against_library": _interval(ratios),
        "share_of_a_request_beyond_its_steps": _interval(beyond),
    }


def first_token(client: Client, rounds: int, words: int, seed: int) -> dict[str, Any]:
    """Seconds to the first token of a chat's next turn, its prefix known or not."""
    generator = random.Random(seed)
    cold, warm = [], []
    for i in range(rounds):
        chat = [{"role": "user", "content": f"{i} {text(generator, words)}"}]
        cold.append(client.ask(chat, 8)[0])
        chat += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
        warm.append(client.ask(chat, 8)[0])
    return {
        "rounds": rounds,
        "cold_seconds": median(cold),
        "warm_seconds": median(warm),
        "cold_against_warm": _interval([c / w for c, w in zip(cold, warm, strict=True)]),
    }


def _interval(values: list[float]) -> dict[str, float]:
    """The median and a 95 % interval of it, by bootstrap."""
    generator = np.random.default_rng(0)
    drawn = np.median(generator.choice(values, (2000, len(values))), axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {"median": median(values), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="qwen2.5-coder-0.5b")
    parser.add_argument("--drafter", default="smollm2-135m")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=1000, help="words of a chat's first turn")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    model = omnidraft.load(given.target, given.drafter, engine=given.engine)
    settings = Settings((given.target,), port=0)
    listening = listen(settings)
    server = Server(settings, lambda name: model.fork())
    web = web_server(server)
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
    thread.start()
    client = Client(listening.getsockname()[1])
    try:
        client.ask([{"role": "user", "content": "Hello!"}], 8)
        prompt = model.prompt_tokens(text(random.Random(0), given.prefix))
        result = {
            "models": {"target": given.target, "drafter": given.drafter},
            "engines": model.engines,
            "overhead": overhead(model, client, given.rounds, given.tokens, seed=0),
            "first_token": {"prefix_tokens": len(prompt)}
            | first_token(client, given.rounds, given.prefix, seed=1),
            "provenance": provenance(),
        }
    finally:
        client.close()
        web.should_exit = True
        thread.join()
        server.close()
    print(json.dumps({key: value for key, value in result.items() if key != "provenance"}, indent=2))
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
