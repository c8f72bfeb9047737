"""What is written is true: snippets run, help examples run, the reference is up to date, defaults work."""

from __future__ import annotations

import importlib.util
import inspect
import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny import write_home

import omnidraft
from omnidraft import cli
from omnidraft.learn.exchange import export_profile
from omnidraft.learn.profile import Document, ProfileKey, ProfileStore

ROOT = Path(__file__).parents[1]
RUN, SHOWN = ("python", "pycon", "bash"), ("py", "text")  # languages of blocks that run, and that do not


@dataclass(frozen=True)
class Snippet:
    where: str
    language: str
    text: str
    reason: str  # why it is not run; empty: it is


def snippets() -> Iterator[Snippet]:
    fence = re.compile(
        r"(?:<!-- not run: (?P<reason>.*?) -->\n)?^```(?P<language>.*)\n(?P<text>[\s\S]*?)^```", re.M
    )
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page = file.read_text(encoding="utf-8")
        for found in fence.finditer(page):
            line = page.count("\n", 0, found.start("text"))
            where = f"{file.name}:{line}"
            yield Snippet(where, found["language"], found["text"], found["reason"] or "")


SNIPPETS = list(snippets())


@pytest.fixture(scope="module")
def whole_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for library in ("torch", "uvicorn"):
        pytest.importorskip(library)
    return write_home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def user(whole_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's machine: the known models on disk (tiny ones), the data of a task, a file of n-grams, a keyboard.

    And what a drafter is built from: a model with its weights, and text.
    """
    from tiny_models import save, tiny_config, tiny_module

    monkeypatch.setenv("OMNIDRAFT_HOME", str(shutil.copytree(whole_home, tmp_path / "home")))
    monkeypatch.setitem(
        sys.modules, "omnidraft.backends.llamacpp", None
    )  # it would fetch the true GGUF files
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    (tmp_path / "DIR").mkdir()
    row = {"text": "Add two numbers.", "test_list": ["assert add(1, 2) == 3"]}
    rows = [json.dumps(row | {"task_id": id}) for id in (11, 601)]  # of the test and of the training split
    (tmp_path / "DIR" / "mbpp.jsonl").write_text("\n".join(rows) + "\n")
    omnidraft.load("qwen2.5-coder-0.5b").save_ngrams(tmp_path / "FILE")
    save(tiny_module(tiny_config("Llama")), tmp_path / "PARENT")
    (tmp_path / "TEXT").mkdir()
    texts = [{"text": f"{number} bottles of beer on the wall, " * 5} for number in range(100)]
    (tmp_path / "TEXT" / "songs.jsonl").write_text("\n".join(map(json.dumps, texts)))
    store = ProfileStore()
    store.save(
        ProfileKey("smollm2-135m", "qwen2.5-coder-0.5b", "default"), {"statistics": Document({"updates": 0})}
    )
    export_profile(store.open(store.find("default").key), tmp_path / "PROFILE.zip")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\n/stats\n/quit\n"))
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: None)  # a server would not end
    monkeypatch.setattr("builtins.input", lambda prompt: sys.stdin.readline().rstrip("\n"))
    return tmp_path


def run_commands(text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every `omnidraft` command of a text, in this process; returns how many there were."""
    count = 0
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";")
        lexer.whitespace_split = True
        words: list[str] = [*lexer, ";"]
        while words:
            command, words = words[: words.index(";")], words[words.index(";") + 1 :]
            if not command:
                continue
            assert command[0] == "omnidraft", (
                f"{command} cannot be run here; say why with <!-- not run: ... -->"
            )
            known = {"NAME": "smollm2-135m"}
            monkeypatch.setattr(sys, "argv", [known.get(word, word) for word in command])
            with pytest.raises(SystemExit) as stop:
                cli.main()
            assert not stop.value.code, command
            count += 1
    return count


def run_python(text: str) -> None:
    exec(compile(text, "<snippet>", "exec"), {})


@pytest.mark.parametrize(
    "snippet", [one for one in SNIPPETS if one.language in RUN and not one.reason], ids=lambda s: s.where
)
def test_a_snippet_runs(snippet: Snippet, user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if snippet.language == "bash":
        assert run_commands(snippet.text, monkeypatch)
    elif snippet.language == "python":
        run_python(snippet.text)
    else:
        run_python(
            "\n".join(line[4:] for line in snippet.text.splitlines() if line.startswith((">>> ", "... ")))
        )


def test_every_block_says_what_it_is() -> None:
    assert {one.language for one in SNIPPETS} <= {*RUN, *SHOWN}, [one for one in SNIPPETS if not one.language]
    assert (
        sum(one.where.startswith("README") and one.language in RUN and not one.reason for one in SNIPPETS)
        >= 2
    )


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not hasattr(command, "list_commands"):
        yield path
        return
    for name in command.list_commands(None):
        yield from leaves(command.get_command(None, name), (*path, name))


def commands() -> list[tuple[str, ...]]:
    from typer.main import get_command

    return [*leaves(get_command(cli.app))]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_help_page_has_an_example_that_runs(
    command: tuple[str, ...], user: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["omnidraft", *command, "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    page = capsys.readouterr().out
    example = page.partition("Example:")[2]
    assert " ".join(command) in example
    assert run_commands(example, monkeypatch)


# --- the reference ---


@pytest.fixture(scope="module")
def api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api", ROOT / "docs" / "api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(api: ModuleType) -> None:
    assert api.OUT.read_text(encoding="utf-8") == api.render(), "run `make docs`"


def test_everything_public_is_documented(api: ModuleType) -> None:
    public = {name: getattr(omnidraft, name) for name in omnidraft.__all__}
    for name in api.MODULES:
        module = importlib.import_module(f"omnidraft.{name}")
        public |= {f"{name}.{member}": value for member, value in api.members(module)}
    for name, member in list(public.items()):
        if inspect.isclass(member):
            public |= {f"{name}.{method}": function for method, (function, _) in api.methods(member).items()}
    # A dataclass without a docstring gets its signature for one.
    bare = [
        name
        for name, member in public.items()
        if (member.__doc__ or "(").startswith(f"{name.split('.')[-1]}(")
    ]
    bare += [name for name, member in public.items() if not member.__doc__]
    assert not bare


# --- defaults ---

TARGET = "qwen2.5-coder-0.5b"
DEFAULTS: dict[str, Callable[[], object]] = {
    "Answer": lambda: str(omnidraft.Answer("", (), "stop", omnidraft.Stats())),
    "OmniDraft": lambda: omnidraft.OmniDraft(omnidraft.load_model(TARGET), None),
    "OmniDraft.answer": lambda: omnidraft.load(TARGET).answer([1, 2, 3], omnidraft.Options()),
    "OmniDraft.cached": lambda: omnidraft.load(TARGET).cached([1, 2, 3]),
    "OmniDraft.close": lambda: omnidraft.load(TARGET).close(),
    "OmniDraft.control": lambda: omnidraft.load(TARGET).control,
    "OmniDraft.engines": lambda: omnidraft.load(TARGET).engines,
    "OmniDraft.follow": lambda: omnidraft.load(TARGET).follow(None),
    "OmniDraft.fork": lambda: omnidraft.load(TARGET).fork(),
    "OmniDraft.generate": lambda: omnidraft.load(TARGET).generate("Hello!"),
    "OmniDraft.learn": lambda: omnidraft.load(TARGET).learn(),
    "OmniDraft.lexicon": lambda: omnidraft.load(TARGET).lexicon,
    "OmniDraft.load_ngrams": lambda: omnidraft.load(TARGET).load_ngrams(Path("FILE")),
    "OmniDraft.prefill": lambda: list(omnidraft.load(TARGET).prefill([1, 2, 3], omnidraft.Options(), 2)),
    "OmniDraft.prompt_tokens": lambda: omnidraft.load(TARGET).prompt_tokens("Hello!"),
    "OmniDraft.release": lambda: omnidraft.load(TARGET).release(None),
    "OmniDraft.reset": lambda: omnidraft.load(TARGET).reset(),
    "OmniDraft.save_ngrams": lambda: omnidraft.load(TARGET).save_ngrams(Path("OUT")),
    "OmniDraft.steps": lambda: list(omnidraft.load(TARGET).steps([1, 2, 3], omnidraft.Options(), 4)),
    "OmniDraft.stream": lambda: list(omnidraft.load(TARGET).stream("Hello!")),
    "OmniDraft.trie": lambda: omnidraft.load(TARGET).trie("prefill"),
    "OmniDraftError": lambda: omnidraft.OmniDraftError(),
    "Options": lambda: omnidraft.Options(),
    "Options.strategy": lambda: omnidraft.Options().strategy,
    "Sampling": lambda: omnidraft.Sampling(),
    "Stats": lambda: omnidraft.Stats(),
    "Stats.acceptance_rate": lambda: omnidraft.Stats().acceptance_rate,
    "Stats.add": lambda: omnidraft.Stats().add(step()),
    "Stats.as_dict": lambda: omnidraft.Stats().as_dict(),
    "Stats.merge": lambda: omnidraft.Stats().merge(omnidraft.Stats()),
    "Stats.other_seconds": lambda: omnidraft.Stats().other_seconds,
    "Stats.tokens_per_second": lambda: omnidraft.Stats().tokens_per_second,
    "Stats.tokens_per_step": lambda: omnidraft.Stats().tokens_per_step,
    "Step": lambda: step(),
    "Step.ngram_hits": lambda: step().ngram_hits,
    "Step.provenance": lambda: step().provenance(0),
    "Stream": lambda: omnidraft.Stream(iter(()), (), 1, omnidraft.Stats().add),
    "Stream.chunks": lambda: list(omnidraft.load(TARGET).stream("Hello!").chunks()),
    "Stream.complete": lambda: omnidraft.load(TARGET).stream("Hello!").complete,
    "Stream.finish_reason": lambda: omnidraft.load(TARGET).stream("Hello!").finish_reason,
    "custom_generate": lambda: omnidraft.custom_generate(),
    "load": lambda: omnidraft.load(TARGET),
    "load_model": lambda: omnidraft.load_model(TARGET),
}


def step() -> omnidraft.Step:
    made = next(omnidraft.load(TARGET).stream("Hello!").chunks()).step
    assert made is not None
    return made


def test_every_public_callable_has_a_run(api: ModuleType) -> None:
    public = {name: getattr(omnidraft, name) for name in omnidraft.__all__}
    names = set(public)
    for name, member in public.items():
        if inspect.isclass(member):
            names |= {f"{name}.{method}" for method in api.methods(member)}
    assert names == DEFAULTS.keys()


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_public_callable_runs_with_its_defaults(name: str, user: Path) -> None:
    DEFAULTS[name]()
