from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy import ToyModel, toy_vocab

from omnidraft import OmniDraft, bench, cli, loading
from omnidraft.catalog import DEFAULT_DRAFTER

TARGET = ToyModel(toy_vocab(60, order=2, padding=5), name="target", seed=1)
DRAFTER = ToyModel(toy_vocab(25, order=1), name="drafter", seed=2)


def run(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """The command line as a user runs it."""
    command = [sys.executable, "-c", "from omnidraft.cli import main; main()", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, input=stdin, env=os.environ | env, timeout=300
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--target", "nope", "hi"], "no model called 'nope'"),
        (["generate", "hi"], "--target"),
        (["generate", "--target", "qwen2.5-coder-0.5b", ""], "prompt is empty"),
        (["generate", "--target", "qwen2.5-coder-0.5b", "--temperature", "-1", "hi"], "temperature is -1.0"),
        (["generate", "--target", "qwen2.5-coder-0.5b", "--method", "tetx", "hi"], "unknown method 'tetx'"),
        (["generate", "--target", "qwen2.5-coder-0.5b", "-k", "0", "hi"], "k is 0"),
        (
            ["generate", "--target", "qwen2.5-coder-0.5b", "--precision", "int3", "hi"],
            "unknown precision 'int3'",
        ),
        (
            ["generate", "--target", "qwen2.5-coder-0.5b", "--precision", "mixed", "hi"],
            "'mixed' is for drafters",
        ),
        (["generate", "--target", "qwen2.5-coder-0.5b", "--device", "nowhere", "hi"], "'nowhere'"),
        (["generate", "--target", "qwen2.5-coder-0.5b", "--frob", "hi"], "--frob"),
        (["bench", "--target", "qwen2.5-coder-0.5b", "--task", "gsm9k"], "unknown task 'gsm9k'"),
        (["bench", "--target", "qwen2.5-coder-0.5b", "--task", "mbpp", "--data", "/nowhere"], "--data"),
        (
            ["bench", "--target", "qwen2.5-coder-0.5b", "--task", __file__, "--engine", "x"],
            "unknown engine 'x'",
        ),
        (["models", "rm", "nope"], "nope"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert ";" in done.stderr, "the cure is missing"


def test_a_mistyped_target_costs_no_download(tmp_path: Path) -> None:
    done = run("generate", "--target", "qwen", "hi", OMNIDRAFT_HOME=str(tmp_path))
    assert "no model called 'qwen'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omnidraft", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == run("--version").stdout


def test_without_a_command_there_is_help() -> None:
    done = run()
    assert done.returncode == 0
    assert done.stdout == run("--help").stdout
    assert done.stdout.startswith("Usage: omnidraft [OPTIONS] COMMAND")


def test_help_version_and_models_need_no_torch() -> None:
    assert "generate" in run("--help").stdout
    assert run("--version").stdout.strip() == "0.1.0"
    assert "smollm2-135m" in run("models").stdout


HEAVY = {"torch", "transformers", "tokenizers", "numpy", "safetensors", "huggingface_hub", "openvino", "gguf"}


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        ("import omnidraft", {"typer", "rich", "filelock", "platformdirs", "pydantic"}),
        ("--help", {"pydantic"}),
        ("generate --help", {"pydantic", "filelock"}),
        ("models --help", {"pydantic", "filelock"}),
        ("frobnicate", set()),
    ],
)
def test_what_starts_at_once_imports_nothing_heavy(program: str, unwanted: set[str]) -> None:
    """Seconds would depend on the machine (benchmarks/startup.py measures them); modules do not."""
    if not program.startswith("import"):
        program = f"sys.argv[1:] = {program.split()}; from omnidraft.cli import main; main()"
    program = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "omnidraft" in loaded
    assert not loaded & (HEAVY | unwanted)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands' own code over toy models."""
    models = {"qwen2.5-coder-0.5b": TARGET, DEFAULT_DRAFTER: DRAFTER}
    monkeypatch.setattr(loading, "load_model", lambda name, **options: models[name])


def call(*arguments: str) -> int:
    try:
        return cli.app(list(arguments), standalone_mode=False) or 0
    except SystemExit as stop:
        return int(stop.code or 0)


def test_generate_json_keeps_its_contract(toys: None, capsys: pytest.CaptureFixture[str]) -> None:
    call("generate", "--target", "qwen2.5-coder-0.5b", "--max-tokens", "20", "--json", "the flake")
    record = json.loads(capsys.readouterr().out)
    assert set(record) == {"text", "tokens", "finish_reason", "stats"}
    assert set(record["stats"]) == {
        "tokens",
        "steps",
        "tokens_per_step",
        "acceptance_rate",
        "drafted",
        "ngram_hits",
        "seconds",
        "tokens_per_second",
        "draft_seconds",
        "verify_seconds",
        "other_seconds",
        "lookup_tokens",
        "plain_steps",
        "engines",
        "control",
    }
    assert record["stats"]["engines"]["target"] == {
        "name": "toy",
        "precision": "float64",
        "device": "cpu",
        "reason": "",
    }
    assert record["tokens"] == list(OmniDraft(TARGET, None).generate("the flake", max_tokens=20).tokens)
    assert record["stats"]["tokens"] == len(record["tokens"])
    call("generate", "--target", "qwen2.5-coder-0.5b", "--max-tokens", "20", "the flake")
    assert capsys.readouterr().out == record["text"] + "\n"


def test_bench_json_keeps_its_contract(
    toys: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the flake\nthen the lake\n")
    out = tmp_path / "out.json"
    call(
        "bench", "--target", "qwen2.5-coder-0.5b", "--task", str(prompts), "--methods", "plain,direct,text",
        "--repeat", "2", "--max-tokens", "20", "-k", "3", "--json", str(out),
    )  # fmt: skip
    record = json.loads(out.read_text())
    assert set(record) == {"provenance", "rows", "answers"}
    assert {"argv", "date", "git", "versions", "machine"} <= set(record["provenance"])
    assert [row["method"] for row in record["rows"]] == ["plain", "direct", "text"]
    for row in record["rows"]:
        assert set(row) == {
            "task", "method", "k", "temperature", "seed", "prompts", "tokens", "steps", "acceptance_rate",
            "tokens_per_step", "lookup_tokens_per_step", "ngram_hits_per_step", "tokens_per_second", "speedup",
            "other_ms_per_step", "identical",
        }  # fmt: skip
        assert row["prompts"] == row["identical"] == 2
        assert row["tokens"] == 2 * 2 * 20
    assert record["rows"][0]["acceptance_rate"] is None
    assert record["rows"][0]["speedup"] == 1
    assert len(record["answers"]) == 3 * 2 * 2
    assert "text" in capsys.readouterr().out


def test_bench_starts_every_answer_from_the_same_state_and_takes_turns() -> None:
    order: list[str] = []
    bench.run(
        TARGET, DRAFTER, {"t": ["the flake", "the lake"]}, ["plain", "text"],
        max_tokens=5, on_run=lambda run: order.append(run.method),
    )  # fmt: skip
    assert order == ["plain", "text", "text", "plain"]


def test_chat_keeps_the_conversation_and_survives_ctrl_c(
    toys: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    real = OmniDraft.stream

    def stream(self, messages, **options):  # type: ignore[no-untyped-def]
        seen.append(len(messages))
        answer = real(self, messages, **options)
        if len(seen) == 2:
            monkeypatch.setattr(type(answer), "__next__", interrupted)
        return answer

    def interrupted(self):  # type: ignore[no-untyped-def]
        monkeypatch.undo()
        monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
        raise KeyboardInterrupt

    lines = iter(["the flake", "/stats", "again", "/nonsense", "/reset", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(OmniDraft, "stream", stream)
    call("chat", "--target", "qwen2.5-coder-0.5b", "--max-tokens", "10")
    shown = capsys.readouterr()
    assert seen == [1, 3]
    assert "tokens a step" in shown.err
    assert "[stopped]" in shown.err
    assert "unknown command /nonsense" in shown.err
    assert "forgotten" in shown.err


def test_demo_shows_colours_and_a_table(
    toys: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from omnidraft import demo

    monkeypatch.setattr(demo, "PROMPTS", demo.PROMPTS[:2])
    call("demo", "--max-tokens", "12")
    shown = capsys.readouterr().out
    assert "drafted" in shown
    assert "acceptance" in shown
    assert shown.count("2/2") == 3
    assert "Learning is left out: drafter runs on an engine that cannot be adapted" in shown


def test_demo_learns_from_two_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    from tiny import write_home

    from omnidraft import demo

    monkeypatch.setenv("OMNIDRAFT_HOME", str(write_home(tmp_path)))
    monkeypatch.setattr(demo, "PROMPTS", demo.PROMPTS[:1])
    monkeypatch.setattr(demo, "STREAMS", {name: own[-6:] for name, own in demo.STREAMS.items()})
    call("demo", "--max-tokens", "12", "--engine", "transformers")
    shown = capsys.readouterr().out
    for domain in demo.STREAMS:
        assert f"Learning from {domain}" in shown
    assert shown.count(" of 2  ") == 4
    rows = [line.split()[-3:] for line in shown.splitlines()[-6:]]
    assert [row[0] for row in rows] == ["before", "during", "after"] * 2
    assert all(float(row[1]) >= 1 for row in rows)


def test_streams_of_the_demo_are_whole() -> None:
    from omnidraft import demo

    for prompts in demo.STREAMS.values():
        assert len(set(prompts)) == len(prompts) == 12 + demo.HELD_OUT


@pytest.mark.models
def test_generate_on_the_real_pair() -> None:
    done = run(
        "generate", "--target", "qwen2.5-coder-0.5b", "--max-tokens", "8", "--json", "-", stdin="What is 2+2?"
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["text"]
    assert record["stats"]["steps"] <= record["stats"]["tokens"]
    assert done.stderr == ""
