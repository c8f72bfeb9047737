from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from time import sleep

import pytest
from toy import ToyModel, ToySession, toy_vocab

from omnidraft import cli, curve, loading
from omnidraft.catalog import DEFAULT_DRAFTER


class SlowSession(ToySession):
    """Passes that take their time: 2 ms and 1 ms a token."""

    def extend(self, tokens, rows):  # type: ignore[no-untyped-def]
        sleep(0.002 + 0.001 * len(tokens))
        return super().extend(tokens, rows)


class SlowModel(ToyModel):
    def session(self) -> SlowSession:
        return SlowSession(self)


def test_measured_times_are_the_passes_own() -> None:
    measured = curve.measure(SlowModel(toy_vocab(10)), [1, 2, 8], repeat=5)
    assert all(ms >= 2 + m for m, ms in measured.items())
    assert measured[8] > measured[1]


@pytest.mark.parametrize(
    ("flat", "draft_ms", "rate", "k"),
    [(True, 0.0, 0.5, 7), (True, 100.0, 0.9, 0), (False, 0.0, 0.5, 0), (True, 10.0, 0.8, 6)],
)
def test_the_best_draft_length(flat: bool, draft_ms: float, rate: float, k: int) -> None:
    costs = {m: 100.0 if flat else 100.0 * m for m in range(1, 9)}
    found = curve.best(costs, draft_ms, rate)
    assert found.k == k
    tokens = (1 - rate ** (k + 1)) / (1 - rate)
    assert found.tokens_per_step == pytest.approx(tokens)
    assert found.speedup == pytest.approx(tokens * 100 / (costs[k + 1] + k * draft_ms))


def test_the_command_writes_table_json_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {
        "qwen2.5-coder-0.5b": SlowModel(toy_vocab(20)),
        DEFAULT_DRAFTER: SlowModel(toy_vocab(10, order=1)),
    }
    monkeypatch.setattr(loading, "load_model", lambda name, **options: models[name])
    written, drawn = tmp_path / "curve.json", tmp_path / "curve.svg"
    arguments = ["curve", "--model", "qwen2.5-coder-0.5b", "--longest", "3", "--repeat", "2"]
    cli.app([*arguments, "--json", str(written), "--svg", str(drawn)], standalone_mode=False)
    record = json.loads(written.read_text())
    assert list(record["curve"]) == ["1", "2", "3"]
    assert [gain["acceptance_rate"] for gain in record["best"]] == list(curve.ACCEPTANCE_RATES)
    assert record["provenance"]["engines"]["target"]["name"] == "toy"
    assert "speedup" in capsys.readouterr().out
    lines = ET.parse(drawn).getroot().iter("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 3]
