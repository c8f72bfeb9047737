"""Many clients at once against `omnidraft serve` on a loopback port: is anything lost, mixed up, or kept in memory?

    python benchmarks/serve_load.py --tiny --json results/serve_load.json
    python benchmarks/serve_load.py --target qwen2.5-coder-0.5b --requests 60 --clients 8

Clients ask in mixed lengths, streamed or not, greedy or with a seed; some leave early and some send what is no request.
A 429 is asked again after the time it names. Each answer is compared with what the target says alone. `--tiny`: models
of the same families with random weights and the real tokenizers, so that the server is what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import omnidraft
from omnidraft import hub
from omnidraft.provenance import provenance

LENGTHS = (4, 16, 16, 32, 64, 128)  # tokens of answers
LEAVING, MALFORMED = 0.10, 0.05
WORDS = (
    "the",
    "stone",
    "lay",
    "by",
    "water",
    "and",
    "a",
    "bird",
    "stood",
    "until",
    "evening",
    "came",
    "over",
)
BAD: list[tuple[bytes, int]] = [
    (b"{", 400),
    (b"[]", 400),
    (b'{"messages": []}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 9}', 400),
    (b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}', 404),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
]


@dataclass
class Ask:
    """One request: what is sent, and what should come."""

    kind: str  # "whole", "leaves" or "malformed"
    body: bytes
    expected: str | int = ""
    options: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""


def plan(count: int, seed: int) -> list[Ask]:
    """The requests, in the order in which clients take them."""
    generator = random.Random(seed)
    asks = []
    for _ in range(count):
        share = generator.random()
        if share < MALFORMED:
            body, status = generator.choice(BAD)
            asks.append(Ask("malformed", body, status))
            continue
        prompt = " ".join(generator.choices(WORDS, k=generator.choice((5, 40, 200))))
        options: dict[str, Any] = {"max_tokens": generator.choice(LENGTHS), "temperature": 0.0}
        if generator.random() < 0.5:
            options |= {"temperature": 0.8, "seed": generator.randrange(1000)}
        body = options | {
            "messages": [{"role": "user", "content": prompt}],
            "stream": generator.random() < 0.5,
        }
        leaves = share < MALFORMED + LEAVING
        asks.append(Ask("leaves" if leaves else "whole", json.dumps(body).encode(), "", options, prompt))
    return asks


class Load:
    """The clients, and what became of their requests."""

    def __init__(self, port: int, pid: int, asks: list[Ask]) -> None:
        self.port, self.pid, self.asks = port, pid, asks
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self.seconds: list[float] = []
        self.first: list[float] = []
        self.memory: list[int] = []  # bytes, after every tenth answer
        self._next = iter(range(len(asks)))
        self._lock = threading.Lock()

    def run(self, clients: int) -> float:
        """Seconds that all of it took."""
        start = time.perf_counter()
        threads = [threading.Thread(target=self._client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    def _client(self) -> None:
        while True:
            with self._lock:
                index = next(self._next, None)
            if index is None:
                return
            try:
                outcome = self._ask(self.asks[index])
            except (OSError, ValueError, KeyError) as error:
                outcome = f"lost: {type(error).__name__}: {error}"
            with self._lock:
                if outcome.startswith(("lost", "mixed")):
                    self.faults.append(outcome)
                self.outcomes[outcome.partition(":")[0]] += 1
                if sum(self.outcomes.values()) % 10 == 0:
                    self.memory.append(resident(self.pid))

    def _ask(self, ask: Ask) -> str:
        start = time.perf_counter()
        while True:
            connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
            try:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/chat/completions", ask.body, headers)
                if ask.kind == "leaves" and b'"stream": false' in ask.body:
                    time.sleep(0.05)
                    return "left"
                response = connection.getresponse()
                if response.status == 429:
                    with self._lock:
                        self.outcomes["asked again"] += 1
                    time.sleep(min(float(response.headers["Retry-After"]), 2.0))
                    continue
                if ask.kind == "malformed":
                    response.read()
                    return "refused" if response.status == ask.expected else f"lost: {response.status}"
                if response.status != 200:
                    return f"lost: {response.status} {response.read()[:200]!r}"
                if ask.kind == "leaves":
                    response.readline()
                    return "left"
                text = self._text(response, start)
                self.seconds.append(time.perf_counter() - start)
                return "answered" if text == ask.expected else f"mixed up: {text!r} is not {ask.expected!r}"
            finally:
                connection.close()

    def _text(self, response: Any, start: float) -> str:
        if response.headers["Content-Type"].startswith("application/json"):
            return str(json.load(response)["choices"][0]["message"]["content"])
        texts = []
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ValueError(chunk["error"])
            if not texts:
                self.first.append(time.perf_counter() - start)
            texts += [choice["delta"].get("content", "") for choice in chunk["choices"]]
        return "".join(texts)


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def shrunk(name: str, folder: Path) -> str:
    """A model of the same family and tokenizer, its weights few and random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = hub.pull(name)
    config = AutoConfig.from_pretrained(source)
    layers = 2
    config.update(
        dict(hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=2)
        | dict(num_key_value_heads=1, head_dim=32)
    )
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                # Sharp laws: over a flat one of 152k tokens rounding alone moves a seeded draw to the next token.
                weight.normal_(std=2.0 if len(weight) == config.vocab_size else 0.2)
    module.save_pretrained(folder)
    for pattern in ("tokenizer*", "chat_template*", "generation_config.json"):
        for file in source.glob(pattern):
            shutil.copy(file, folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="qwen2.5-coder-0.5b")
    parser.add_argument("--drafter", default="smollm2-135m")
    parser.add_argument("--tiny", action="store_true", help="shrink both to random weights")
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--queue", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = given.target, given.drafter
        if given.tiny:
            target, drafter = (
                shrunk(name, Path(folder) / role)
                for role, name in (("target", given.target), ("drafter", given.drafter))
            )
        result = measure(target, drafter, given)
    result["models"] = {"target": given.target, "drafter": given.drafter, "tiny": given.tiny}
    print(json.dumps({key: value for key, value in result.items() if key != "provenance"}, indent=2))
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(bool(result["faults"]))


def measure(target: str, drafter: str, given: argparse.Namespace) -> dict[str, Any]:
    asks = plan(given.requests, given.seed)
    alone = omnidraft.load(target, None, engine=given.engine)
    for ask in asks:
        if ask.kind == "whole":
            ask.expected = alone.generate(ask.prompt, **ask.options).text
    engine = alone.engines
    del alone
    command = [
        sys.executable, "-c", "from omnidraft.cli import main; main()", "serve", "--target", target,
        "--drafter", drafter, "--engine", given.engine, "--port", "0", "--slots", str(given.slots),
        "--queue", str(given.queue),
    ]  # fmt: skip
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr
    try:
        said = next(line for line in server.stderr if "/v1" in line)
        port = int(said.partition("/v1")[0].rpartition(":")[2])
        threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop the server
        load = Load(port, server.pid, asks)
        before = resident(server.pid)
        seconds = load.run(given.clients)
    finally:
        server.terminate()
        server.wait(60)
    warm = load.memory[len(load.memory) // 3]  # slots and tables are there
    return {
        "clients": given.clients,
        "requests": given.requests,
        "slots": given.slots,
        "queue": given.queue,
        "engines": engine,
        "outcomes": dict(load.outcomes),
        "faults": load.faults[:20],
        "seconds": seconds,
        "latency_seconds": _spread(load.seconds),
        "first_token_seconds": _spread(load.first),
        "memory_bytes": {
            "before": before,
            "after_a_third": warm,
            "end": load.memory[-1],
            "most": max(load.memory),
        },
        "exit_code": server.returncode,
        "provenance": provenance(),
    }


def _spread(seconds: list[float]) -> dict[str, float] | None:
    if len(seconds) < 2:
        return None
    return {"median": median(seconds), "p95": quantiles(seconds, n=20)[-1], "most": max(seconds)}


if __name__ == "__main__":
    main()
