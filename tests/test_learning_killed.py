"""A process that learns from a stream, killed at any moment: the profile stays whole and misses one update at most."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("peft")

from learning_drafter import write_drafter

from omnidraft.learn.profile import ProfileStore

# Answers a stream without end, and says when it begins and how many updates there were after each.
LEARNING = """
import sys
from pathlib import Path
from toy import ToyModel, toy_vocab
from omnidraft import OmniDraft
from omnidraft.backends.huggingface import HuggingFaceModel
from omnidraft.learn.profile import ProfileStore

target = ToyModel(toy_vocab(60, order=2, padding=5), name="target", seed=1)
model = OmniDraft(target, HuggingFaceModel(Path(sys.argv[1]), name="tiny", precision="float32"))
learner = model.learn("between", profile="default", budget=1.0, batch=1, store=ProfileStore(Path(sys.argv[2])))
assert learner.problem is None, learner.problem
learner.on_update = lambda update: print(learner.account.updates, flush=True)
print("begun", flush=True)
while True:
    for prompt in ("the flake", "a stone lay", "then the lake", "by the water"):
        model.generate(prompt, method="text", k=4, max_tokens=12)
"""


def kill_at_random(folder: Path, count: int) -> None:
    drafter, store = write_drafter(folder / "drafter"), ProfileStore(folder / "profiles")
    draw = random.Random(0)
    updates = 0
    for _ in range(count):
        child = subprocess.Popen(
            [sys.executable, "-c", LEARNING, str(drafter), str(folder / "profiles")],
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent,
        )  # fmt: skip
        assert child.stdout
        assert child.stdout.readline() == "begun\n"
        told = [updates, *(int(child.stdout.readline()) for _ in range(draw.randrange(1, 4)))]
        time.sleep(draw.uniform(0, 0.3))
        child.kill()
        told += map(int, child.communicate()[0].split())
        saved = store.open(store.find("default").key)
        assert saved.problem is None
        updates = saved.document("statistics")["updates"]
        # An update is told of before it is saved.
        assert told[-1] - 1 <= updates <= told[-1], told
    assert updates >= count // 2


def test_a_killed_stream_loses_one_update_at_most(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 3)


@pytest.mark.full
def test_fifty_killed_streams_lose_one_update_each_at_most(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 50)
