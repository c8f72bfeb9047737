"""Whatever is wrong is one line that names the cause and the cure: the same from the command line and in Python."""

from __future__ import annotations

import io
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tiny import write_tiny

import omnidraft
from omnidraft import cli, errors
from omnidraft.tasks import load_task

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    return write_tiny(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A checkpoint to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command line, in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["omnidraft", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        shown = capfd.readouterr()
        return int(stop.value.code or 0), shown.out, shown.err

    return run


def assert_one_error(result: tuple[int, str, str], message: str) -> None:
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert ";" in err, "the cure is missing"
    assert message in err


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# --- files ---


def cut(file: str, at: int) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        path = model / file
        path.write_bytes(path.read_bytes()[:at])

    return damage


def put(file: str, content: str) -> Callable[[Path], None]:
    return lambda model: (model / file).write_text(content) and None


def configured(**changes: object) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def without(file: str) -> Callable[[Path], None]:
    return lambda model: (model / file).unlink()


def without_a_tensor(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    del weights["transformer.ln_f.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def diffusion(model: Path) -> None:
    for file in model.iterdir():
        file.unlink()
    (model / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights cut": (cut("model.safetensors", -1), "truncated model.safetensors"),
    "weights empty": (cut("model.safetensors", 0), "weights"),
    "weights are something else": (put("model.safetensors", "not weights at all"), "unreadable"),
    "weights lack a tensor": (without_a_tensor, "lacks 1 of its weights, transformer.ln_f.weight"),
    "no weights": (without("model.safetensors"), "has no model.safetensors"),
    "tokenizer cut": (cut("tokenizer.json", 1000), "damaged tokenizer.json"),
    "tokenizer of nothing": (put("tokenizer.json", '{"a": 1}'), "no tokenizer that transformers can load"),
    "tokenizer damaged inside": (put("tokenizer.json", '{"version": "1.0", "model" }'), "no tokenizer that"),
    "no tokenizer": (without("tokenizer.json"), "has no tokenizer.json"),
    "config cut": (cut("config.json", -3), "damaged config.json"),
    "config is a list": (put("config.json", "[]"), "damaged config.json"),
    "no config": (without("config.json"), "has no config.json"),
    "config of another size": (configured(n_embd=32), "cannot be loaded"),
    "config of nothing": (put("config.json", "{}"), "a kind that transformers does not know"),
    "an unheard-of kind": (configured(model_type="frobnicator"), "a kind that transformers does not know"),
    "an encoder": (configured(architectures=["BertForMaskedLM"], model_type="bert"), "is a BertForMaskedLM"),
    "no output layer": (configured(architectures=["GPT2Model"]), "is a GPT2Model, which does not write"),
    "a part of a diffusion model": (put("config.json", '{"_class_name": "UNet2D"}'), "transformers does not"),
    "a diffusion model": (diffusion, "has no config.json"),
    "an empty folder": (lambda model: [file.unlink() for file in model.iterdir()] and None, "has no config"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_or_unfit_model(model: Path, run: Run, case: str) -> None:
    damage, message = FILES[case]
    damage(model)
    before = snapshot(model)
    with pytest.raises(errors.OmniDraftError) as raised:
        omnidraft.load(str(model), None)
    assert message in str(raised.value)
    assert_one_error(run("generate", "--target", str(model), "--method", "plain", "hi"), message)
    assert snapshot(model) == before, "the user's files are the user's"


def test_the_whole_model_does_load(whole: Path, run: Run) -> None:
    code, out, _ = run("generate", "-t", str(whole), "-d", str(whole), "--max-tokens", "3", "hi")
    assert code == 0
    assert out


def test_a_prompt_longer_than_the_context(whole: Path, run: Run) -> None:
    message = "the prompt has 200 tokens and"
    with pytest.raises(errors.ContextLengthError, match=message):
        omnidraft.load(str(whole), None).generate("x" * 200, raw=True)
    assert_one_error(
        run("generate", "-t", str(whole), "--method", "plain", "--raw", "x" * 200), "shorten the prompt"
    )


def test_weights_of_nan(model: Path, run: Run) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    weights["transformer.ln_f.weight"].fill_(float("nan"))
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    message = f"{model} gave NaN or infinite logits after 2 tokens"
    with pytest.raises(errors.InvalidLogitsError) as raised:
        omnidraft.load(str(model), None).generate("hi", raw=True)
    assert message in str(raised.value)
    code, out, err = run("generate", "-t", str(model), "--method", "plain", "--raw", "hi")
    assert (code, out.strip()) == (2, "")
    assert err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    "content", [b"", b"GGU", b"PK\x03\x04 a zip", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64]
)
def test_a_gguf_file_that_is_none(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(errors.OmniDraftError, match="GGUF"):
        omnidraft.load(str(file), None)
    assert_one_error(run("generate", "-t", str(file), "--method", "plain", "hi"), "GGUF")
    assert file.read_bytes() == content


def test_tokenizers_of_equal_size_are_not_taken_for_the_same(whole: Path, tmp_path: Path, run: Run) -> None:
    other = write_tiny(tmp_path / "other", order=1)
    model = omnidraft.load(str(whole), str(other))
    assert model.drafter is not None
    assert model.drafter.vocab.size == model.target.vocab.size
    assert model.alignment is not None
    assert not model.alignment.same
    assert omnidraft.load(str(whole), str(whole)).alignment.same  # type: ignore[union-attr]
    plain = omnidraft.load(str(whole), None).generate("the flake", raw=True)
    for method in ("text", "direct", "ngram", "prefill"):
        assert model.generate("the flake", raw=True, method=method).tokens == plain.tokens
    ngrams = tmp_path / "ngrams.json"
    model.save_ngrams(ngrams)
    before = ngrams.read_bytes()
    options = ["-t", str(other), "-d", str(whole), "--method", "ngram", "--ngrams", str(ngrams)]
    assert_one_error(run("generate", *options, "hi"), "vocabulary is another")
    assert ngrams.read_bytes() == before


# --- options and prompts ---

BEFORE_LOADING = {  # arguments after `generate --target qwen2.5-coder-0.5b`
    "k is 0": ["-k", "0", "hi"],
    "k is 65": ["-k", "65", "hi"],
    "Invalid value for '-k'": ["-k", "1.5", "hi"],
    "Invalid value for '--temperature'": ["--temperature", "warm", "hi"],
    "temperature is nan": ["--temperature", "nan", "hi"],
    "temperature is -1.0": ["--temperature", "-1", "hi"],
    "temperature is inf": ["--temperature", "inf", "hi"],
    "top_p is 0.0": ["--top-p", "0", "hi"],
    "top_p is 2.0": ["--top-p", "2", "hi"],
    "top_k is -1": ["--top-k", "-1", "hi"],
    "min_p is 1.0": ["--min-p", "1", "hi"],
    "repetition_penalty is 0.0": ["--repetition-penalty", "0", "hi"],
    "presence_penalty is nan": ["--presence-penalty", "nan", "hi"],
    "seed is -1": ["--seed", "-1", "hi"],
    "max_tokens is 0": ["--max-tokens", "0", "hi"],
    "stop string": ["--stop", "", "hi"],
    "unknown method 'x'": ["--method", "x", "hi"],
    "unknown verification 'x'": ["--verification", "x", "hi"],
    "cannot be verified by 'trie'": ["--method", "text", "--verification", "trie", "hi"],
    "unknown eviction 'x'": ["--method", "ngram", "--ngram-eviction", "x", "hi"],
    "ngram_capacity is -1": ["--method", "ngram", "--ngram-capacity", "-1", "hi"],
    "--ngrams is for method ngram": ["--method", "text", "--ngrams", "x.json", "hi"],
    "--frobnicate": ["--frobnicate", "hi"],
    "the prompt is empty": [""],
    "lone surrogates": ["a\udc80"],
    "no model called 'smollm'": ["--drafter", "smollm", "hi"],
    "cannot be read": ["--json-schema", "/nowhere/schema.json", "hi"],
}


@pytest.mark.parametrize("message", BEFORE_LOADING)
def test_options_are_refused_before_anything_is_fetched(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert_one_error(run("generate", "--target", "qwen2.5-coder-0.5b", *BEFORE_LOADING[message]), message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("schema", "message"),
    [("{", "is not JSON"), ('{"type": "nonsense"}', "schema is refused"), ("\udcff", "is not JSON")],
)
def test_a_broken_schema(tmp_path: Path, run: Run, schema: str, message: str) -> None:
    pytest.importorskip("llguidance")
    file = tmp_path / "schema.json"
    file.write_bytes(schema.encode(errors="surrogateescape"))
    options = ["--target", "qwen2.5-coder-0.5b", "--json-schema", str(file)]
    assert_one_error(run("generate", *options, "hi"), message)


def test_a_missing_extra_is_named(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "schema.json"
    file.write_text("{}")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(errors.MissingExtraError, match=r"pip install 'omnidraft\[grammar\]'"):
        omnidraft.Options(json_schema="{}")
    options = ["--target", "qwen2.5-coder-0.5b", "--json-schema", str(file)]
    assert_one_error(run("generate", *options, "hi"), "pip install 'omnidraft[grammar]'")


# --- benchmark data ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b'{"task_id": 11, "te', "is damaged"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"question": "?"}', "holds no rows of task mbpp"),
        (b'{"task_id": 11}', "holds no rows of task mbpp"),
        (b"[1]", "holds no rows of task mbpp"),
    ],
)
def test_the_data_of_a_task(tmp_path: Path, run: Run, content: bytes | None, message: str) -> None:
    if content:
        (tmp_path / "mbpp.jsonl").write_bytes(content)
    with pytest.raises(errors.OptionError, match=message):
        load_task("mbpp", tmp_path, 1)
    options = ["--target", "qwen2.5-coder-0.5b", "--task", "mbpp", "--data", str(tmp_path)]
    assert_one_error(run("bench", *options), message)


def test_the_default_data_folder_is_not_there(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_one_error(
        run("bench", "--target", "qwen2.5-coder-0.5b", "--task", "gsm8k"), "pass its folder with --data"
    )


# --- files that cannot be written ---


def test_ngrams_that_cannot_be_saved(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(errors.NGramFileError, match="cannot be written"):
        omnidraft.load(str(whole), str(whole)).save_ngrams(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_result_for_which_there_is_no_space(whole: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "prompts.txt").write_text("the flake\n")
    options = [
        "-t",
        str(whole),
        "-d",
        str(whole),
        "--task",
        str(tmp_path / "prompts.txt"),
        "--max-tokens",
        "4",
    ]
    code, out, err = run("bench", *options, "--json", "/dev/full")
    assert code == 2
    assert " text " in out, "what was measured is shown all the same"
    assert err.startswith("error: ")
    assert "No space left on device" in err


# --- the cache folder ---


@pytest.mark.parametrize(
    "arguments",
    [["models"], ["models", "--verify"], ["pull", "smollm2-135m"], ["models", "rm", "smollm2-135m"]],
)
def test_a_home_that_is_a_file(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "file"))
    assert_one_error(run(*arguments), "which is a file; set it to a folder")
    assert (tmp_path / "file").read_text() == "mine"


# --- models ---


@pytest.mark.parametrize("model", [None, 3, b"name", ["name"]], ids=str)
def test_what_is_no_model(model: object) -> None:
    with pytest.raises(errors.OptionError, match=r"the target is .*; pass a known name"):
        omnidraft.load(model)  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="the model is "):
        omnidraft.load_model(model)  # type: ignore[arg-type]


def test_paths_are_given_as_paths_or_as_text(whole: Path, tmp_path: Path) -> None:
    model = omnidraft.load(whole, whole)
    model.save_ngrams(str(tmp_path / "ngrams.json"))
    model.load_ngrams(str(tmp_path / "ngrams.json"))


# --- commands ---

COMMANDS = {  # refused before a model is looked for
    "method plain has no drafter": ["adapt", "--method", "plain"],
    "unknown learn 'never'": ["adapt", "--learn", "never"],
    "unknown loss 'x'": ["adapt", "--loss", "x"],
    "unknown head 'x'": ["adapt", "--head", "x"],
    "budget is 3": ["adapt", "--budget", "3"],
    "gamma is 2": ["adapt", "--gamma", "2"],
    "rank is 0": ["adapt", "--rank", "0"],
    "limit is 0": ["adapt", "--limit", "0"],
    "'../x' cannot be a profile's name": ["adapt", "--profile", "../x"],
    "x.foo is not a picture's name": ["adapt", "--plot", "x.foo"],
}


@pytest.mark.parametrize("message", COMMANDS)
def test_adapt_refuses_before_anything_is_loaded(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("the flake\n" * 20)
    monkeypatch.setattr("omnidraft.loading.load", lambda *given, **how: pytest.fail("a model was loaded"))
    command, *options = COMMANDS[message]
    assert_one_error(run(command, "-t", "qwen2.5-coder-0.5b", "--prompts", "prompts.txt", *options), message)


def test_a_curve_longer_than_the_context(whole: Path, run: Run) -> None:
    options = ["-m", str(whole), "-d", str(whole), "--longest", "60", "--context", "10"]
    assert_one_error(run("curve", *options), "come to 70 tokens and")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drafter"], "Missing command; see `omnidraft drafter --help`"),
        (["profile", "show"], "see `omnidraft profile show --help`"),
        (["generate"], "see `omnidraft generate --help`"),
        (["frobnicate"], "see `omnidraft --help`"),
        (["chat", "--server", "http://127.0.0.1:1", "-k", "3"], "-k is the server's to choose"),
    ],
)
def test_a_mistake_names_the_help_that_mends_it(run: Run, arguments: list[str], message: str) -> None:
    assert_one_error(run(*arguments), message)


# --- servers ---


@contextmanager
def answering(*bodies: bytes) -> Iterator[str]:
    """A server that answers so in turn, each time promising more than it sends: its address."""
    left = list(bodies)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = left.pop(0)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body) + (0 if left else 10)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *given: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"data": []}', b"[]", b'{"data": [{}]}'])
def test_a_server_of_something_else(run: Run, body: bytes) -> None:
    with answering(body, b"") as url:
        assert_one_error(run("chat", "--server", url), "is no server of models; give the address")


def test_a_server_that_goes_in_mid_answer_does_not_end_the_conversation(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/stat\n/quit\n"))
    chunk = b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n'
    with answering(b'{"data": [{"id": "one"}]}', chunk) as url:
        code, out, err = run("chat", "--server", url)
    assert code == 0
    assert "Hi" in out
    assert "error: the server is gone in mid-answer" in err
    assert "unknown command /stat" in err
