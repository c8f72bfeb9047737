"""Profiles: what is saved comes back, whatever happens to the process, the disk or the files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from saving import KEY, SECRET, parts, saved_value, value_of
from toy import toy_vocab

from omnidraft import cache, cli, hub
from omnidraft.errors import NGramFileError, ProfileError
from omnidraft.learn import manifest as manifests
from omnidraft.learn import profile as profiles
from omnidraft.learn.arrays import BFLOAT16, parse, serialise
from omnidraft.learn.exchange import export_profile, import_profile
from omnidraft.learn.manifest import Manifest, Unsound, folder_of, model_of
from omnidraft.learn.profile import Arrays, Document, ProfileKey, ProfileStore
from omnidraft.ngrams import Trie
from omnidraft.spellings import Lexicon
from omnidraft.vocab import Alignment

FILES = [
    *(f"{name}.{'json' if isinstance(part, Document) else 'safetensors'}" for name, part in parts(0).items())
]


SAVING = [sys.executable, str(Path(__file__).with_name("saving.py"))]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileStore:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    return ProfileStore()


def version_folder(store: ProfileStore, version: int, key: ProfileKey = KEY) -> Path:
    return store.folder(key) / f"v{version:06}"


# Arrays


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.sampled_from(
            ["f8", "f4", ">f4", "f2", "i8", ">i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]
        ).flatmap(
            lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0))
        ),
        max_size=4,
    ),
    st.dictionaries(st.text(max_size=4).filter(str.isprintable), st.text(max_size=4).filter(str.isprintable)),
)
def test_arrays_and_metadata_come_back(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    again, text = parse(memoryview(b"".join(serialise({n: a.T for n, a in arrays.items()}, metadata))))
    assert text == metadata
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert again[name].shape == array.T.shape
        assert again[name].dtype == array.dtype.newbyteorder("<")
        assert again[name].tobytes() == array.T.astype(again[name].dtype).tobytes()


def test_arrays_are_safetensors_as_others_read_and_write_them() -> None:
    library = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(3, dtype=np.int8), "b": np.eye(3, dtype=np.float32), "c": np.zeros((0, 2))}
    ours = b"".join(serialise(arrays, {"format": "pt"}))
    for name, array in library.load(ours).items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)
    theirs, metadata = parse(memoryview(library.save(arrays, {"format": "pt"})))
    assert metadata == {"format": "pt"}
    for name, array in theirs.items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)


def test_bfloat16_survives_as_torch_writes_it() -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    tensor = torch.tensor([[1.0, -2.5], [3e38, 0.0]], dtype=torch.bfloat16)
    arrays, _ = parse(memoryview(library.save({"w": tensor})))
    assert arrays["w"].dtype == BFLOAT16
    assert torch.equal(torch.tensor(arrays["w"].view("u2")).view(torch.bfloat16), tensor)
    mine = tensor.view(torch.uint16).numpy().view(BFLOAT16)
    assert torch.equal(library.load(b"".join(serialise({"w": mine}, {})))["w"], tensor)


@pytest.mark.parametrize(
    "array",
    [np.array([object()]), np.array(["text"]), np.array([1j]), np.zeros(2, [("a", "<u2"), ("b", "<u2")])],
)
def test_arrays_that_cannot_be_kept_are_refused_before_the_disk_is_touched(
    store: ProfileStore, array: np.ndarray
) -> None:
    with pytest.raises(ProfileError, match="'adapter_model' cannot be kept"):
        store.save(KEY, {"adapter_model": Arrays({"w": array})})
    with pytest.raises(ProfileError, match="'statistics' cannot be kept"):
        store.save(KEY, {"statistics": Document({"acceptance": float("nan")})})
    with pytest.raises(ProfileError, match=r"'\.\./x' cannot be kept"):
        store.save(KEY, {"../x": Document({})})
    assert not store.root.exists()


# Saving and opening


def test_a_profile_comes_back_part_by_part(store: ProfileStore) -> None:
    new = store.open(KEY)
    assert (new.version, new.parts, new.problem) == (0, (), None)
    assert not store.root.exists()  # reading makes no folders
    assert store.save(KEY, parts(1)) == 1
    assert store.save(KEY, parts(2)) == 2
    profile = store.open(KEY)
    assert (value_of(profile), profile.version, profile.problem) == (2, 2, None)
    with pytest.raises(KeyError):
        profile.arrays("statistics")
    with pytest.raises(KeyError):
        profile.document("adapter_model")
    assert not profile.arrays("adapter_model")["lora_A"].flags.writeable


def test_parts_not_given_are_kept_and_none_drops_one(store: ProfileStore) -> None:
    store.save(KEY, parts(1))
    store.save(
        KEY, {"statistics": Document({"updates": 9}), "head": Arrays({"w": np.ones(3)}), "replay": None}
    )
    profile = store.open(KEY)
    assert set(profile.parts) == {"adapter_model", "adapter_config", "optimiser", "statistics", "head"}
    assert profile.document("statistics") == {"updates": 9}
    assert (profile.arrays("adapter_model")["lora_A"] == 1).all()
    store.save(KEY, {"head": Document(["now", "a", "document"])})
    assert store.open(KEY).document("head") == ["now", "a", "document"]
    assert not (version_folder(store, 3) / "head.safetensors").exists()


def test_what_did_not_change_is_not_written_again(store: ProfileStore) -> None:
    store.save(KEY, parts(1))
    store.save(KEY, {"adapter_model": parts(2)["adapter_model"], "replay": parts(1)["replay"]})
    first, second = version_folder(store, 1), version_folder(store, 2)
    same = {file for file in FILES if (first / file).samefile(second / file)}
    assert same == set(FILES) - {"adapter_model.safetensors"}


def test_saving_without_hard_links_copies(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    store.save(KEY, parts(1))
    store.save(KEY, {"head": Document(1)})
    assert store.open(KEY).document("head") == 1
    assert store.open(KEY).document("statistics")["updates"] == 1


def test_two_versions_are_kept(store: ProfileStore) -> None:
    for value in range(5):
        store.save(KEY, parts(value))
    assert sorted(os.listdir(store.folder(KEY))) == ["v000004", "v000005"]


def test_an_open_profile_does_not_change_under_later_saves(store: ProfileStore) -> None:
    store.save(KEY, parts(1))
    profile = store.open(KEY)
    for value in range(2, 6):
        store.save(KEY, parts(value))
    assert value_of(profile) == 1
    other = ProfileKey("org/drafter", "another", "work")
    store.save(other, parts(7))
    assert (value_of(store.open(other)), value_of(store.open(KEY))) == (7, 5)


def test_only_the_owner_can_read(store: ProfileStore) -> None:
    before = os.umask(0)
    try:
        store.save(KEY, parts(1))
        store.save(KEY, {"head": Document(1)})
    finally:
        os.umask(before)
    for parent, folders, files in os.walk(store.root):
        for folder in folders:
            assert (Path(parent) / folder).stat().st_mode & 0o777 == 0o700
        for file in files:
            assert (Path(parent) / file).stat().st_mode & 0o777 == 0o600
    assert store.root.stat().st_mode & 0o777 == 0o700


def test_a_version_is_on_the_disk_before_it_has_its_name(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        events.append(("sync", os.fstat(descriptor).st_ino))

    def renamed(source: Path, to: Path) -> None:
        events.append(("rename", os.stat(source).st_ino))
        rename(source, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    store.save(KEY, parts(1))
    version = version_folder(store, 1)
    at = events.index(("rename", version.stat().st_ino))
    written = {path.stat().st_ino for path in [version, *version.iterdir()]}
    assert {inode for kind, inode in events[:at] if kind == "sync"} == written
    assert ("sync", version.parent.stat().st_ino) in events[at:]


def test_n_grams_are_kept_as_a_document(store: ProfileStore) -> None:
    lexicon = Lexicon.build(Alignment(toy_vocab(25, order=1), toy_vocab(60, order=2)))
    trie = Trie(lexicon)
    trie.insert(range(lexicon.alignment.target.size))
    trie.use(next(iter(trie.uses)))
    store.save(KEY, {"ngrams": Document(trie.record(drafter=KEY.drafter, target=KEY.target))})
    again = Trie(lexicon)
    again.insert_record(store.open(KEY).document("ngrams"), "ngrams.json")
    assert again.uses == trie.uses
    with pytest.raises(NGramFileError, match=r"ngrams\.json is not a whole"):
        again.insert_record({"format": "another"}, "ngrams.json")


# Names


@given(
    st.text(min_size=1, max_size=30)
    | st.sampled_from([".", "..", "a/../b", "C:\\x", "~", "/home/a", "a\0b", "\udcff"])
)
def test_a_model_s_name_is_one_folder_and_comes_back(name: str) -> None:
    folder = folder_of(name)
    assert model_of(folder) == name
    assert not folder.startswith(".")
    assert not set(folder) & set('/\\\0:*?"<>| ')


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a\\b", "a b", "ä", "a\n", "x" * 65])
def test_unsafe_profile_names_are_refused(name: str) -> None:
    with pytest.raises(ProfileError, match="cannot be a profile's name; "):
        ProfileKey("drafter", "target", name)


def test_model_names_that_cannot_be_folders_are_refused() -> None:
    with pytest.raises(ProfileError, match="; give both"):
        ProfileKey("", "target")
    with pytest.raises(ProfileError, match="something shorter"):
        ProfileKey("drafter", "x" * 256)


# Crashes


def kill_at_random(root: Path, count: int) -> None:
    draw = random.Random(0)
    began = saved_value(root)
    for _ in range(count):
        child = subprocess.Popen([*SAVING, str(root), "1000"], stdout=subprocess.PIPE, text=True)
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        told = [began, *(int(child.stdout.readline()) for _ in range(draw.randrange(4)))]
        time.sleep(draw.uniform(0, 0.1))
        child.kill()
        told += map(int, child.communicate()[0].split())
        # Killed between a save and the word of it, it left one more.
        began = saved_value(root)
        assert began in (told[-1], told[-1] + 1)


def test_a_killed_process_loses_one_save_at_most(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "profiles", 5)


@pytest.mark.full
def test_fifty_killed_processes_lose_one_save_each_at_most(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "profiles", 50)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="dies by a signal, in a fork")
def test_a_save_may_die_before_any_change_to_the_disk(tmp_path: Path) -> None:
    done = subprocess.run([*SAVING, str(tmp_path / "profiles")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_an_interrupted_save_changes_nothing_and_its_rest_is_swept(store: ProfileStore) -> None:
    store.save(KEY, parts(1))
    rest = store.folder(KEY) / "v000002.tmp"
    rest.mkdir()
    (rest / "replay.safetensors").write_bytes(b"half")
    assert value_of(store.open(KEY)) == 1
    assert store.save(KEY, parts(2)) == 3
    assert not rest.exists()


@pytest.mark.parametrize("calls", range(1, 8))
def test_a_full_disk_is_one_clear_error_and_the_last_version_stays(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    store.save(KEY, parts(1))
    real, left = os.fsync, [calls]

    def full(descriptor: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProfileError, match=r"No space left on device.*; .*make room"):
        store.save(KEY, parts(2))
    assert sorted(os.listdir(store.folder(KEY))) == ["v000001"]
    assert value_of(store.open(KEY)) == 1
    assert store.save(KEY, parts(3)) == 2


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", mounted], capture_output=True
    ).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        store = ProfileStore(mounted / "profiles")
        store.save(KEY, parts(1))
        with pytest.raises(ProfileError, match="No space left on device"):
            store.save(KEY, parts(2) | {"replay": Arrays({"bytes": np.zeros(1 << 20, np.uint8)})})
        assert value_of(store.open(KEY)) == 1
        assert store.save(KEY, parts(3)) == 2
        assert value_of(store.open(KEY)) == 3
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = ProfileStore(tmp_path / "file" / "profiles")
    for work in (lambda: store.save(KEY, parts(1)), lambda: store.claim(KEY).__enter__()):
        with pytest.raises(ProfileError, match=r"cannot write profile .*; .*OMNIDRAFT_HOME"):
            work()


# Damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.parametrize("harm", [flip, cut, extend, Path.unlink])
@pytest.mark.parametrize("file", ["manifest.json", *FILES])
def test_a_damaged_version_is_set_aside_and_the_one_before_used(
    store: ProfileStore, harm: Callable[[Path], None], file: str
) -> None:
    store.save(KEY, parts(1))
    store.save(KEY, parts(2))
    damaged = version_folder(store, 2) / file
    harm(damaged)
    profile = store.open(KEY)
    assert value_of(profile) == 1
    assert profile.problem
    assert str(damaged) in profile.problem
    assert "v000002.damaged; the version before it is used" in profile.problem
    assert sorted(os.listdir(store.folder(KEY))) == ["v000001", "v000002.damaged"]
    assert store.open(KEY).problem is None  # said once
    assert store.save(KEY, parts(3)) == 3
    assert value_of(store.open(KEY)) == 3
    assert store.find("default").set_aside == ("v000002.damaged",)


def test_where_both_versions_share_a_damaged_file_the_other_parts_are_used(store: ProfileStore) -> None:
    store.save(KEY, parts(1))
    store.save(KEY, {"statistics": Document({"updates": 2})})
    flip(version_folder(store, 2) / "replay.safetensors")
    profile = store.open(KEY)
    assert profile.problem
    assert "its other parts are used" in profile.problem
    assert set(profile.parts) == set(parts(0)) - {"replay"}
    assert profile.document("statistics") == {"updates": 2}
    assert (profile.arrays("adapter_model")["lora_A"] == 1).all()
    again = store.open(KEY)
    assert (again.problem, again.version, again.parts) == (None, 3, profile.parts)
    assert again.manifest.key == KEY


def test_where_nothing_is_whole_learning_starts_anew(store: ProfileStore) -> None:
    store.save(KEY, parts(1))
    store.save(KEY, parts(2))
    for version in (1, 2):
        cut(version_folder(store, version) / "manifest.json")
    profile = store.open(KEY)
    assert (profile.version, profile.parts) == (0, ())
    assert profile.problem
    assert profile.problem.count("manifest.json") == 2
    assert profile.problem.endswith("learning starts anew")
    assert store.save(KEY, parts(3)) == 3


def test_no_byte_of_a_manifest_can_change_unseen() -> None:
    whole = Manifest(KEY, {"head.json": manifests.Entry(3, "0" * 64, True)}).render()
    assert Manifest.parse(whole).key == KEY
    for at in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            with pytest.raises(Unsound):
                Manifest.parse(bytes(data))


def rewrite(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    """A manifest that another program could have written: with a right checksum."""
    record = json.loads((folder / "manifest.json").read_bytes())
    del record["sha256"]
    change(record)
    (folder / "manifest.json").write_bytes(manifests._sealed(record))


@pytest.mark.parametrize(
    ("change", "ending", "message"),
    [
        (lambda record: record.update(version=2), "newer", "newer version of omnidraft"),
        (lambda record: record.update(format="shopping list"), "foreign", "another format"),
        (
            lambda record: record["key"].update(drafter_fingerprint="x"),
            "foreign",
            "the drafter's vocabulary is another",
        ),
        (
            lambda record: record["key"].update(target_fingerprint="x"),
            "foreign",
            "the target's vocabulary is another",
        ),
        (
            lambda record: record["key"].update(drafter_weights="x"),
            "foreign",
            "the drafter's weights are others",
        ),
        (lambda record: record.pop("key"), "foreign", "not a manifest that omnidraft wrote"),
        (lambda record: record["key"].update(name="../up"), "foreign", "not a manifest that omnidraft wrote"),
        (lambda record: record["files"].update({"../up.json": {}}), "foreign", "not a manifest"),
    ],
)
def test_what_is_foreign_or_newer_is_set_aside_by_name(
    store: ProfileStore, change: Callable[[dict[str, object]], object], ending: str, message: str
) -> None:
    store.save(KEY, parts(1))
    store.save(KEY, parts(2))
    rewrite(version_folder(store, 2), change)
    profile = store.open(KEY)
    assert value_of(profile) == 1
    assert profile.problem
    assert message in profile.problem
    assert f"v000002.{ending}" in profile.problem
    assert (store.folder(KEY) / f"v000002.{ending}" / "replay.safetensors").exists()


def test_a_profile_of_other_weights_is_refused_by_name(store: ProfileStore) -> None:
    store.save(KEY, parts(1))
    other = ProfileKey(
        KEY.drafter, KEY.target, "default", KEY.drafter_fingerprint, KEY.target_fingerprint, "v" * 64
    )
    profile = store.open(other)
    assert profile.parts == ()
    assert profile.problem
    assert "profile default of drafter org/drafter and target target" in profile.problem
    assert "here the drafter's weights are others" in profile.problem
    assert store.save(other, parts(5)) == 2
    assert store.find("default").set_aside == ("v000001.foreign",)


def test_a_copied_folder_is_known_by_its_fingerprints(store: ProfileStore) -> None:
    store.save(KEY, parts(1))
    renamed = ProfileKey("my/drafter", "target", "copy", "d" * 64, "t" * 64)
    shutil.copytree(store.folder(KEY), store.folder(renamed))
    assert value_of(store.open(renamed)) == 1  # the same vocabularies under other names
    unknown = ProfileKey("another", "target")
    shutil.copytree(store.folder(KEY), store.folder(unknown))
    assert "of profile default of drafter org/drafter" in str(store.open(unknown).problem)


def test_fingerprints_once_known_are_not_forgotten(store: ProfileStore) -> None:
    store.save(KEY, parts(1))
    store.save(ProfileKey(KEY.drafter, KEY.target), {"head": Document(1)})
    assert store.open(KEY).manifest.key == KEY
    store.reset(ProfileKey(KEY.drafter, KEY.target))
    assert store.open(KEY).manifest.key == KEY


def test_a_file_that_vanished_does_not_stop_later_saves(
    store: ProfileStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(KEY, parts(1))
    (version_folder(store, 1) / "replay.safetensors").unlink()
    store.save(KEY, {"head": Document(1)})
    assert "replay.safetensors is damaged, and not carried on" in caplog.text
    assert set(store.open(KEY).parts) == (set(parts(0)) | {"head"}) - {"replay"}


# Several at once


def test_two_processes_and_a_reader(tmp_path: Path) -> None:
    root = tmp_path / "profiles"
    children = [subprocess.Popen([*SAVING, str(root), "12"], stdout=subprocess.DEVNULL) for _ in range(2)]
    opened = 0
    while any(child.poll() is None for child in children):
        opened += saved_value(root) > 0
    assert [child.wait() for child in children] == [0, 0]
    assert ProfileStore(root).open(KEY).version == 24
    assert opened


def test_a_reader_that_is_overtaken_reads_what_is_there_now(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two saves between its look at the folder and its reading; the second is still deleting the first version."""
    monkeypatch.setattr(profiles, "_PATIENCE", 0.05)
    look, other = profiles.versions_in, ProfileStore(store.root)

    def overtaken(folder: Path) -> list[Path]:
        found = look(folder)
        monkeypatch.setattr(profiles, "versions_in", look)
        with monkeypatch.context() as patched:
            patched.setattr(
                shutil, "rmtree", lambda path, **_: (path / "replay.safetensors").unlink(missing_ok=True)
            )
            other.save(KEY, parts(2))
            other.save(KEY, parts(3))
        return found

    store.save(KEY, parts(1))
    with other.claim(KEY):  # the reader may not wait for it
        monkeypatch.setattr(profiles, "versions_in", overtaken)
        profile = store.open(KEY)
    assert (value_of(profile), profile.problem) == (3, None)


def test_threads_of_one_store_take_turns(store: ProfileStore) -> None:
    def save() -> None:
        for value in range(10):
            store.save(KEY, parts(value))

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.open(KEY).version == 40


def test_a_claimed_profile_is_written_by_its_claimant_only(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "_PATIENCE", 0.05)
    other = ProfileStore(store.root)  # as in another process, where the lock is concerned
    with store.claim(KEY):
        store.save(KEY, parts(1))
        thread = threading.Thread(target=store.save, args=(KEY, parts(2)))
        thread.start()
        thread.join()
        assert value_of(other.open(KEY)) == 2
        works = [
            lambda: other.claim(KEY).__enter__(),
            lambda: other.save(KEY, parts(3)),
            lambda: other.reset(KEY),
            lambda: other.remove(KEY),
        ]
        for work in works:
            with pytest.raises(ProfileError, match="in use by another process; "):
                work()
        flip(version_folder(store, 2) / "replay.safetensors")
        profile = other.open(KEY)
        assert value_of(profile) == 1
        assert "it stays where it is: profile default" in str(profile.problem)
    with other.claim(KEY):
        assert value_of(other.open(KEY)) == 1
    assert store.find("default").set_aside == ("v000002.damaged",)


def test_a_claim_holds_against_another_process_and_ends_with_it(store: ProfileStore) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from saving import KEY, ProfileStore\n"
    code += "with ProfileStore().claim(KEY): print('held', flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ProfileError, match="in use by another process; "), store.claim(KEY):
        pass
    holder.kill()
    holder.communicate()
    with store.claim(KEY):
        assert store.save(KEY, parts(1)) == 1


# Forgetting


def test_reset_forgets_everything_and_keeps_the_profile(store: ProfileStore) -> None:
    store.save(KEY, parts(1))
    store.save(KEY, parts(2))
    flip(version_folder(store, 2) / "replay.safetensors")
    store.open(KEY)
    store.reset(KEY)
    assert store.open(KEY).parts == ()
    assert store.find("default").key == KEY
    for path in store.root.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


def test_remove_leaves_nothing(store: ProfileStore) -> None:
    store.save(KEY, parts(1))
    store.remove(KEY)
    assert store.profiles() == []
    assert not list(store.root.rglob("v0*"))
    for work in (store.remove, store.reset):
        with pytest.raises(ProfileError, match="no such profile: default of drafter org/drafter"):
            work(KEY)


# Moving


@pytest.fixture
def exported(store: ProfileStore, tmp_path: Path) -> Path:
    store.save(KEY, parts(1))
    assert export_profile(store.open(KEY), tmp_path / "p.zip", with_text=True) == []
    return tmp_path / "p.zip"


def test_a_profile_moves_to_another_machine(exported: Path, tmp_path: Path) -> None:
    elsewhere = ProfileStore(tmp_path / "elsewhere")
    import_profile(elsewhere, exported)
    assert value_of(elsewhere.open(KEY)) == 1
    with pytest.raises(ProfileError, match=r"there is a profile default .*; "):
        import_profile(elsewhere, exported)
    import_profile(elsewhere, exported, name="work", target="here/target")
    moved = ProfileKey("org/drafter", "here/target", "work", "d" * 64, "t" * 64, "w" * 64)
    assert value_of(elsewhere.open(moved)) == 1
    assert "drafter's vocabulary" in str(
        elsewhere.open(ProfileKey("org/drafter", "here/target", "work", "x" * 64)).problem
    )
    elsewhere.save(KEY, parts(2))
    import_profile(elsewhere, exported, replace=True)
    assert value_of(elsewhere.open(KEY)) == 1
    assert len(os.listdir(elsewhere.folder(KEY))) == 1  # what it replaced is gone


def test_the_user_s_text_is_exported_only_when_asked_for(store: ProfileStore, tmp_path: Path) -> None:
    store.save(KEY, parts(1))
    plain, full = tmp_path / "plain.zip", tmp_path / "full.zip"
    assert export_profile(store.open(KEY), plain) == ["replay"]
    export_profile(store.open(KEY), full, with_text=True)

    def holds_text(file: Path) -> bool:
        with zipfile.ZipFile(file) as archive:
            return any(SECRET.encode() in archive.read(name) for name in archive.namelist())

    assert not holds_text(plain)
    assert holds_text(full)
    assert full.stat().st_mode & 0o777 == 0o600
    elsewhere = ProfileStore(tmp_path / "elsewhere")
    import_profile(elsewhere, plain)
    assert set(elsewhere.open(KEY).parts) == set(parts(0)) - {"replay"}
    with pytest.raises(ProfileError, match="nothing to export"):
        export_profile(store.open(ProfileKey("a", "b")), tmp_path / "none.zip")


def forged(exported: Path, change: Callable[[dict[str, bytes]], object], **how: int) -> None:
    """Rewrite an export, its manifest right about what was changed in `files`."""
    with zipfile.ZipFile(exported) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    change(contents)
    with zipfile.ZipFile(exported, "w", **how) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)


def bomb(contents: dict[str, bytes]) -> None:
    """A replay of zeros that the manifest calls small."""
    contents["replay.safetensors"] = bytes(64 << 20)


def claim_size(contents: dict[str, bytes]) -> None:
    record = json.loads(contents["manifest.json"])
    del record["sha256"]
    record["files"]["replay.safetensors"]["size"] = 1 << 40
    contents["manifest.json"] = manifests._sealed(record)


def not_arrays(contents: dict[str, bytes]) -> None:
    """A part that is as its manifest says, and yet no safetensors."""
    record = json.loads(contents["manifest.json"])
    del record["sha256"]
    contents["replay.safetensors"] = b"\x80\x04pickle?"
    digest = hashlib.sha256(contents["replay.safetensors"]).hexdigest()
    record["files"]["replay.safetensors"] |= {"size": 9, "sha256": digest}
    contents["manifest.json"] = manifests._sealed(record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda contents: contents.update({"../../evil.json": b"{}"}), "holds other files"),
        (lambda contents: contents.update({"/etc/evil.json": b"{}"}), "holds other files"),
        (lambda contents: contents.pop("replay.safetensors"), "holds other files"),
        (lambda contents: contents.pop("manifest.json"), "has no manifest.json"),
        (lambda contents: contents.update({"manifest.json": b"{}"}), "not a whole manifest"),
        (lambda contents: contents.update({"manifest.json": bytes(2 << 20)}), "manifest.json that is not"),
        (lambda contents: contents.update({"statistics.json": b"{}"}), "statistics.json that is not"),
        (bomb, "replay.safetensors that is not"),
        (claim_size, "more than a profile may"),
        (not_arrays, "replay.safetensors that cannot be read"),
    ],
)
@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_forged_export_is_refused_and_changes_nothing(
    exported: Path,
    tmp_path: Path,
    change: Callable[[dict[str, bytes]], object],
    message: str,
    compression: int,
) -> None:
    forged(exported, change, compression=compression)
    elsewhere = ProfileStore(tmp_path / "elsewhere")
    with pytest.raises(
        ProfileError, match=f"p.zip .*{message if compression == zipfile.ZIP_DEFLATED else ''}.*; "
    ):
        import_profile(elsewhere, exported)
    assert not list(elsewhere.root.rglob("v0*"))
    assert not list(tmp_path.rglob("evil*"))


def test_a_damaged_export_is_refused_or_whole(exported: Path, tmp_path: Path) -> None:
    """At any byte: refused by name, or, where the zip format does not look, imported as it was."""
    whole = exported.read_bytes()
    draw = random.Random(0)
    for at in draw.sample(range(len(whole)), 60):
        data = bytearray(whole)
        data[at] ^= 1 << draw.randrange(8)
        exported.write_bytes(data)
        elsewhere = ProfileStore(tmp_path / "elsewhere" / str(at))
        with contextlib.suppress(ProfileError):
            import_profile(elsewhere, exported)
            assert value_of(elsewhere.open(KEY)) == 1
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        exported.write_bytes(whole[:length])
        with pytest.raises(ProfileError, match=r"p\.zip is not a whole exported profile; "):
            import_profile(elsewhere, exported, replace=True)
    with pytest.raises(ProfileError, match=r"none\.zip cannot be read"):
        import_profile(elsewhere, tmp_path / "none.zip")


# Whose weights


def test_weights_are_told_apart(tmp_path: Path) -> None:
    for name, data in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(data)
    a, b, c = (hub.weights_fingerprint(tmp_path / name) for name in "abc")
    assert a == c != b
    manifest = dict.fromkeys(cache._MANIFEST_KEYS, "") | {"sha256": "of the GGUF file"}
    (tmp_path / "c" / "omnidraft.json").write_text(json.dumps(manifest))
    assert hub.weights_fingerprint(tmp_path / "c") == "of the GGUF file"


# The command line


@pytest.fixture
def filled(store: ProfileStore) -> ProfileStore:
    store.save(KEY, parts(1))
    store.save(ProfileKey("org/drafter", "another", "work"), parts(2))
    return store


def call(*arguments: str) -> int:
    return cli.app(["profile", *arguments], standalone_mode=False) or 0


def test_list_and_show(filled: ProfileStore, capsys: pytest.CaptureFixture[str]) -> None:
    call("list")
    shown = capsys.readouterr().out
    assert "default" in shown
    assert "org/drafter" in shown
    assert str(filled.root) in shown
    call("list", "--json")
    record = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in record["profiles"]] == ["work", "default"]
    call("show", "default")
    shown = capsys.readouterr().out
    for text in ("updates", "held_out.after", "0.42", "replay.safetensors", "your text"):
        assert text in shown
    call("show", "default", "--json")
    record = json.loads(capsys.readouterr().out)
    assert record["statistics"]["held_out"] == {"before": 0.31, "after": 0.42}
    assert record["files"]["replay.safetensors"]["text"] is True
    assert record["problem"] is None


def test_the_documented_python_runs(store: ProfileStore) -> None:
    docs = (Path(__file__).parents[1] / "docs" / "profiles.md").read_text(encoding="utf-8")
    code = docs.partition("```python\n")[2].partition("```")[0]
    for _ in range(2):
        exec(code, {})
    (info,) = store.profiles()
    assert store.open(info.key).document("statistics") == {"updates": 2}


def test_show_says_what_is_damaged(filled: ProfileStore, capsys: pytest.CaptureFixture[str]) -> None:
    flip(version_folder(filled, 1) / "replay.safetensors")
    call("show", "default")
    printed = capsys.readouterr()
    assert "replay.safetensors is not as it was saved" in printed.err
    assert "v000001.damaged" in printed.out


def test_export_import_reset_and_rm(
    filled: ProfileStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "p.zip")
    call("export", "default", file)
    assert "left out, since it holds your text: replay" in capsys.readouterr().out
    with pytest.raises(Exception, match="exists; add --force"):
        call("export", "default", file)
    call("export", "default", file, "--force", "--with-text")
    call("import", file, "--name", "copy")
    assert value_of(filled.open(filled.find("copy").key)) == 1
    with pytest.raises(ProfileError, match="there is a profile copy"):
        call("import", file, "--name", "copy")
    call("import", file, "--name", "copy", "--replace")
    call("reset", "copy", "--yes")
    assert filled.open(filled.find("copy").key).parts == ()
    call("rm", "copy", "--yes")
    with pytest.raises(ProfileError, match="no such profile: copy"):
        filled.find("copy")
    call("import", file, "--target", "another")
    with pytest.raises(ProfileError, match=r"default is the name of 2 profiles .*--drafter, --target"):
        call("rm", "default", "--yes")
    call("rm", "default", "--yes", "--target", "another")
    assert value_of(filled.open(KEY)) == 1


def test_rm_and_reset_ask_first(
    filled: ProfileStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("reset", "rm"):
        for answer in ("n\n", "\n", ""):
            monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
            with pytest.raises(typer.Abort):
                call(name, "default")
            assert (
                "profile default of drafter org/drafter and target target? [y/N]" in capsys.readouterr().err
            )
    assert value_of(filled.open(KEY)) == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    call("rm", "default")
    with pytest.raises(ProfileError, match="no such profile: default; "):
        call("show", "default")
    with pytest.raises(ProfileError, match=r"no such profile: wok; did you mean work\? "):
        call("show", "wok")
