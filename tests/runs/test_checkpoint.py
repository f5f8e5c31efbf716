"""Checkpoints on disk: whole or not at all, whatever stops the writer; damage is noticed; pruning keeps the rest."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from tinyrl.runs import checkpoint
from tinyrl.runs.checkpoint import (
    MANIFEST,
    check_room,
    checkpoint_step,
    free_oldest,
    list_checkpoints,
    newest_sound,
    problem_with,
    prune,
    write_checkpoint,
)

FILES = {
    "adapter_model.safetensors": b"\x08\x00\x00\x00\x00\x00\x00\x00{}      weights",
    "critic/adapter_model.safetensors": b"the critic's",
    "state.json": b'{"step": 7}',
}
SHA256_OF_STATE = "23344736596883ce1a08ba1d0135b621cc0f1d92006e26ee80597136c815876f"  # from sha256sum


def fill(folder: Path, text: bytes = b"") -> None:
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content + text)


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below a folder, hidden files too; None for a folder."""
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """checkpoints/ with two sound checkpoints, of steps 5 and 10."""
    for step in (5, 10):
        write_checkpoint(tmp_path / "checkpoints", step, write=fill)
    return tmp_path / "checkpoints"


def test_what_is_written(root: Path):
    folder = root / "step-000010"
    assert {p.name for p in root.iterdir()} == {"step-000005", "step-000010"}
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["step"], set(manifest["files"])) == (10, set(FILES))
    assert manifest["files"]["state.json"] == {"bytes": 11, "sha256": SHA256_OF_STATE}
    assert newest_sound(root) == (folder, [])


def test_only_checkpoints_are_listed_in_the_order_of_their_steps(root: Path):
    for name in ("step-1000000", "step-²", "best", ".writing-step-000011"):
        (root / name).mkdir()
    with pytest.raises(ValueError, match="is not a checkpoint folder"):
        checkpoint_step(root / "step-²")
    (root / "step-000099").write_text("a file")
    assert [p.name for p in list_checkpoints(root)] == ["step-000005", "step-000010", "step-1000000"]
    assert newest_sound(root / "none") == (None, [])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "adapter_model.safetensors").read_bytes())
    content[9] ^= 1
    (folder / "adapter_model.safetensors").write_bytes(content)


def rewrite(folder: Path, **values: object) -> None:
    """Lay values over those of MANIFEST.json."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | values))


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("state.json", lambda f: (f / "state.json").unlink()),
    ("critic/adapter_model.safetensors", lambda f: os.truncate(f / "critic/adapter_model.safetensors", 3)),
    ("adapter_model.safetensors", flip_a_bit),
    (MANIFEST, lambda f: (f / MANIFEST).unlink()),
    (MANIFEST, lambda f: os.truncate(f / MANIFEST, 40)),
    (MANIFEST, lambda f: (f / MANIFEST).write_text("[" * 99_999)),
    (MANIFEST, lambda f: rewrite(f, files={})),
    (MANIFEST, lambda f: rewrite(f, step=5)),
    (MANIFEST, lambda f: rewrite(f, step="10")),
]


@pytest.mark.parametrize(("place", "damage"), DAMAGE)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    root: Path, place: str, damage: Callable[[Path], object]
):
    damage(root / "step-000010")
    folder, [warning] = newest_sound(root)
    assert folder == root / "step-000005"
    assert warning.startswith(f"step-000010: {place}")


def test_a_copy_of_a_checkpoint_under_a_name_of_its_own_is_sound(root: Path):
    copy = (root / "step-000010").rename(root / "best-so-far")
    assert problem_with(copy) is None


# renames: the old one aside, the new one in; fsyncs: three files, the manifest, critic/, the folder, and the root last
@pytest.mark.parametrize(("call", "number"), [("rename", 1), ("rename", 2), *[("fsync", n) for n in range(1, 7)]])
def test_a_disk_that_fails_at_any_call_leaves_what_was_there(
    root: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch
):
    before, plain, calls = tree(root), getattr(os, call), [0]

    def fails(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(*arguments)

    monkeypatch.setattr(checkpoint.os, call, fails)
    with pytest.raises(OSError, match="Input/output error"):
        write_checkpoint(root, 10, write=lambda folder: fill(folder, b"new"))
    assert tree(root) == before


def test_a_full_disk_in_a_rust_library_is_an_oserror(root: Path):
    """safetensors has the number of the system's error in its text alone."""

    def full(folder: Path) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    before = tree(root)
    with pytest.raises(OSError, match="step-000010") as caught:
        write_checkpoint(root, 10, write=full)
    assert caught.value.errno == errno.ENOSPC
    assert tree(root) == before


KILLED_AT = """
    import os, signal, sys
    from pathlib import Path
    from tinyrl.runs import checkpoint

    root, call, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    plain, calls = getattr(os, call), 0

    def killed(*arguments, **named):
        global calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **named)

    def write(folder):
        for name in ("adapter_model.safetensors", "state.json"):
            (folder / name).write_bytes(b"second")
            setattr(os, call, killed)

    checkpoint.write_checkpoint(root, 10, write=write)
"""


KILLS = [("fsync", 1, 10), ("rename", 1, 15), ("rename", 2, 10), ("fsync", 5, 15), ("rmdir", 1, 10), ("rename", 2, 15)]


@pytest.mark.parametrize(("call", "number", "next_step"), KILLS)
def test_a_writer_that_is_killed_leaves_a_whole_checkpoint_of_its_step(
    root: Path, call: str, number: int, next_step: int
):
    """kill -9 while files are flushed, before and between the two renames, and while the old one is deleted."""
    command = [sys.executable, "-c", textwrap.dedent(KILLED_AT), str(root), call, str(number)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    folder, warnings = newest_sound(root)
    assert folder is not None
    assert not warnings
    assert checkpoint_step(folder) == 10
    assert (folder / "state.json").read_bytes() in (b'{"step": 7}', b"second")

    # the next save and pruning clean up
    write_checkpoint(root, next_step, write=fill)
    prune(root, keep=2, protected=[])
    left = list_checkpoints(root)
    assert [checkpoint_step(p) for p in left] == sorted({5, 10, next_step})[-2:]
    assert [problem_with(p) for p in left] == [None, None]
    assert len(list(root.iterdir())) == 2


def test_pruning_keeps_the_newest_and_the_protected(root: Path):
    for step in (15, 20, 25):
        write_checkpoint(root, step, write=fill)
    (root / ".writing-step-000030").mkdir()
    (root / "notes.txt").write_text("a person's")
    prune(root, keep=2, protected=[root / "step-000010", root / "step-000099"])
    assert {p.name for p in root.iterdir()} == {"step-000010", "step-000020", "step-000025", "notes.txt"}
    assert problem_with(root / "step-000025") is None


def test_a_full_disk_frees_the_oldest_checkpoint_but_the_best(root: Path):
    for step in (15, 20):
        write_checkpoint(root, step, write=fill)
    assert free_oldest(root, best=root / "step-000005") == root / "step-000010"
    assert {p.name for p in root.iterdir()} == {"step-000005", "step-000015", "step-000020"}
    assert free_oldest(root, best=root / "step-000005") == root / "step-000015"
    assert free_oldest(root, best=root / "step-000005") is None  # one sound one would remain
    assert {p.name for p in root.iterdir()} == {"step-000005", "step-000020"}


def test_a_damaged_checkpoint_is_freed_and_is_none_of_those_that_remain(root: Path):
    write_checkpoint(root, 15, write=fill)
    (root / "step-000010" / MANIFEST).unlink()
    assert free_oldest(root, best=root / "step-000015") is None  # without step 5 there would be one sound one
    assert free_oldest(root, best=root / "step-000005") == root / "step-000010"


def test_nothing_is_freed_that_makes_no_room(root: Path, monkeypatch: pytest.MonkeyPatch):
    """The newest checkpoint has half a million bytes, the oldest a few, and the disk has none."""
    write_checkpoint(root, 15, write=lambda folder: fill(folder, bytes(500_000)))
    before, disk = tree(root), shutil.disk_usage(root)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: disk._replace(free=0))
    assert free_oldest(root, best=root) is None
    assert tree(root) == before


def test_a_pruner_that_is_killed_is_finished_by_the_next_one(root: Path):
    (root / "step-000005" / MANIFEST).unlink()
    assert newest_sound(root) == (root / "step-000010", [])
    prune(root, keep=1, protected=[])
    assert {p.name for p in root.iterdir()} == {"step-000010"}


def test_a_save_deletes_what_a_killed_pruner_left_before_it_needs_the_room(root: Path):
    (root / "step-000005").rename(root / ".deleting-step-000005")
    (root / ".writing-step-000007").symlink_to(root / "step-000010")
    there = set[str]()
    write_checkpoint(root, 15, write=lambda folder: there.update(p.name for p in root.iterdir()) or fill(folder))
    assert there == {"step-000010", ".writing-step-000015"}
    assert problem_with(root / "step-000010") is None


def test_no_folder_is_made_for_a_run_that_is_gone(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        write_checkpoint(tmp_path / "run" / "checkpoints", 5, write=fill)
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_an_error_before_anything_is_written(tmp_path: Path):
    check_room(tmp_path / "runs" / "not-there-yet", needed=1)
    with pytest.raises(OSError, match=r"a checkpoint takes") as caught:
        check_room(tmp_path / "runs" / "not-there-yet", needed=1 << 60)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert not list(tmp_path.iterdir())
