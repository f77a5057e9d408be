"""Checkpoints are written completely or not at all, and a failed write says why."""

import errno
import os
import resource
import stat
import threading
from contextlib import contextmanager

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lightning_turbo import AtomicCheckpointIO
from lightning_turbo.errors import NoEffectWarning
from tests.trainers import quiet_trainer
from tests.versions import unpickling

OLD, NEW = {"step": 1, "w": torch.zeros(4)}, {"step": 2, "w": torch.ones(4), "big": torch.ones(2**20)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "last.ckpt"


@contextmanager
def files_of_at_most(size):
    """Like a full disk: the system refuses to write files beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(path):
    return sorted(file.name for file in path.parent.iterdir())


def test_a_checkpoint_is_saved_loaded_replaced_and_removed(path):
    io = AtomicCheckpointIO()
    for checkpoint in (OLD, NEW):
        io.save_checkpoint(checkpoint, path)
        loaded = io.load_checkpoint(path)
        assert loaded["step"] == checkpoint["step"]
        assert torch.equal(loaded["w"], checkpoint["w"])
        assert names(path) == ["last.ckpt"]
    io.remove_checkpoint(str(path))
    assert names(path) == []


def test_a_path_with_a_tilde_is_saved_and_loaded_in_the_home_folder(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("HOME", str(tmp_path / "home"))
        AtomicCheckpointIO().save_checkpoint(OLD, "~/runs/last.ckpt")
        assert AtomicCheckpointIO().load_checkpoint("~/runs/last.ckpt")["step"] == 1
    assert names(tmp_path / "home" / "runs" / "last.ckpt") == ["last.ckpt"]


# In the first bytes of the file, in the middle of a tensor, and in the zip directory at the end.
@pytest.mark.parametrize("size", [0, 100, 2**20, 2**22])
def test_a_failed_write_keeps_the_previous_checkpoint_and_says_what_to_do(size, path):
    io = AtomicCheckpointIO()
    io.save_checkpoint(OLD, path)
    before = path.read_bytes()
    with files_of_at_most(size), pytest.raises(OSError, match=r"last\.ckpt' could not be written \(File too") as e:
        io.save_checkpoint(NEW, path)
    assert e.value.errno == errno.EFBIG
    assert "earlier ones are unchanged. Free space or" in str(e.value)
    with pytest.raises(Exception, match=r"lambda|pickle"):
        io.save_checkpoint({"f": lambda: None}, path)
    assert path.read_bytes() == before
    assert names(path) == ["last.ckpt"]


def test_a_checkpoint_is_synced_to_disk_before_the_rename_and_readable_by_others(path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (done.append(name), real(*a))[1])
    AtomicCheckpointIO().save_checkpoint(OLD, path)
    assert done == ["fsync", "replace", "fsync"]  # the last one is the folder's
    (plain := path.with_name("plain")).write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    with pytest.raises(OSError, match=r"plain/last\.ckpt' could not be written \((File exists|Not a directory)"):
        AtomicCheckpointIO().save_checkpoint(OLD, plain / "last.ckpt")


def test_concurrent_saves_to_one_path_all_succeed_and_every_file_is_complete(path):
    """As for runs that start within one second and get the same folder."""
    failed = []

    def save(run):
        io = AtomicCheckpointIO()
        for _ in range(10):
            try:
                io.save_checkpoint({"run": run, "w": torch.full((10_000,), run)}, path)
                loaded = torch.load(path)
                assert (loaded["w"] == loaded["run"]).all()
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=save, args=(run,)) for run in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert names(path) == ["last.ckpt"]


def test_a_link_is_replaced_and_its_target_stays(path):
    io = AtomicCheckpointIO()
    io.save_checkpoint(OLD, path.with_name("step=1.ckpt"))
    path.symlink_to("step=1.ckpt")
    io.save_checkpoint(NEW, path)
    assert [io.load_checkpoint(path.with_name(name))["step"] for name in ("step=1.ckpt", "last.ckpt")] == [1, 2]


def test_object_stores_and_storage_options_are_left_to_lightning(path):
    io = AtomicCheckpointIO()
    io.save_checkpoint(OLD, "memory://runs/last.ckpt")
    try:
        assert io.load_checkpoint("memory://runs/last.ckpt")["step"] == 1
    finally:
        MemoryFileSystem.store.clear()
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint(OLD, path, storage_options={"a": 1})


@pytest.mark.parametrize("strategy", ["single", "ddp", "sharded"])
def test_a_strategy_that_calls_no_checkpoint_io_is_told_of(strategy, recwarn):
    def trainer():
        kind = {"single": SingleDeviceStrategy, "ddp": DDPStrategy, "sharded": ModelParallelStrategy}[strategy]
        given = kind(device="cpu") if strategy == "single" else kind()
        return quiet_trainer(strategy=given, plugins=[AtomicCheckpointIO(background=True)])

    if strategy == "sharded":
        with pytest.warns(
            NoEffectWarning, match="^AtomicCheckpointIO has no effect under ModelParallelStrategy, which"
        ):
            trainer()
    else:
        assert isinstance(trainer().strategy.checkpoint_io, AtomicCheckpointIO)
        assert not [each for each in recwarn if issubclass(each.category, NoEffectWarning)]


# Background saves


def after(batches):
    """Return the loop counters of a checkpoint after a given number of batches, within an epoch."""
    epochs, total = {"current": {"ready": 1, "completed": 0}}, {"total": {"ready": batches}}
    return {"loops": {"fit_loop": {"epoch_progress": epochs, "epoch_loop.batch_progress": total}}}


IN_EPOCH = after(1)


@pytest.fixture
def background():
    io = AtomicCheckpointIO(background=True)
    yield io
    io.teardown()


@pytest.fixture
def gate(monkeypatch):
    """An event. Writing waits until it is set."""
    opened, save = threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *args: (opened.wait(30), save(*args)))
    yield opened
    opened.set()


def test_a_background_save_ignores_later_changes_and_keeps_shared_tensors(path, background, gate):
    flat = torch.arange(8.0)
    sparse = torch.eye(3).to_sparse()
    state = {
        **IN_EPOCH, "flat": flat, "views": [flat[:3], flat[3:].view(5, 1)], "again": flat, "empty": torch.empty(0),
        "half": torch.ones(3, dtype=torch.bfloat16), "sparse": sparse, "module": torch.nn.Linear(2, 2),
        "seen": [1], "names": {"a": 1},
    }  # fmt: skip
    weight = state["module"].weight.detach().clone()
    background.save_checkpoint(state, path)
    flat.zero_()
    sparse._values().zero_()
    torch.nn.init.zeros_(state["module"].weight)
    state["seen"].append(2)
    state["names"].clear()
    assert not path.exists()
    gate.set()
    loaded = background.load_checkpoint(path, **unpickling(False))
    assert loaded["flat"].tolist() == list(range(8))
    assert [view.flatten().tolist() for view in loaded["views"]] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert loaded["again"] is loaded["flat"]
    assert loaded["views"][1].untyped_storage().data_ptr() == loaded["flat"].untyped_storage().data_ptr()
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(loaded["module"].weight, weight)
    assert isinstance(loaded["module"].weight, torch.nn.Parameter)
    assert (loaded["half"].dtype, loaded["empty"].shape) == (torch.bfloat16, (0,))
    assert (loaded["seen"], loaded["names"]) == ([1], {"a": 1})
    background.save_checkpoint({**state, "flat": flat + 1}, path)  # in the memory of the previous copy
    assert background.load_checkpoint(path, **unpickling(False))["flat"].tolist() == [1.0] * 8


def test_only_one_background_save_runs_and_files_are_removed_after_their_replacement(path, background, gate):
    old = path.with_name("old.ckpt")
    gate.set()
    background.save_checkpoint(OLD, old)  # outside of an epoch, so the save is synchronous
    assert background.load_checkpoint(old)["step"] == 1
    gate.clear()
    background.save_checkpoint(NEW | IN_EPOCH, path)
    background.remove_checkpoint(old)
    second = threading.Thread(target=background.save_checkpoint, args=(NEW | IN_EPOCH | {"step": 3}, path))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    unfinished, *others = names(path)
    assert unfinished.startswith(".last.ckpt.")
    assert others == ["old.ckpt"]
    gate.set()
    second.join()
    assert names(path)[-1] == "last.ckpt"
    assert not old.exists()
    assert background.load_checkpoint(path)["step"] == 3


def test_saves_are_synchronous_if_a_link_points_to_a_checkpoint(path, background, gate):
    """With ``save_last="link"``, Lightning creates the link right after the save. It must point to a complete file."""
    gate.set()
    background.save_checkpoint(OLD | after(1), path.with_name("step=1.ckpt"))
    background.load_checkpoint(path.with_name("step=1.ckpt"))
    path.symlink_to("step=1.ckpt")
    background.save_checkpoint(NEW | after(2), path.with_name("step=2.ckpt"))
    assert torch.load(path.with_name("step=2.ckpt"))["step"] == 2


def test_an_error_of_a_background_save_is_raised_once_and_no_file_is_removed(path, background):
    old = path.with_name("old.ckpt")
    background.save_checkpoint(OLD, old)
    for batches, find in ((1, lambda: background.save_checkpoint(NEW | IN_EPOCH, path)), (3, background.teardown)):
        background.save_checkpoint(OLD | after(batches), old)
        with files_of_at_most(2**20):
            background.save_checkpoint(NEW | after(batches + 1), path)
            background.remove_checkpoint(old)
            with pytest.raises(OSError, match=r"last\.ckpt' could not be written \(File too"):
                find()
        assert names(path) == ["old.ckpt"]
        background.teardown()
    with pytest.raises(Exception, match=r"lambda|pickle"):  # raised by the save itself
        background.save_checkpoint(IN_EPOCH | {"f": lambda: None}, path)
    background.save_checkpoint(NEW | IN_EPOCH, path)
    background.teardown()
    assert torch.load(path)["step"] == 2
    with pytest.raises(TypeError, match="background=1: expected True or False"):
        AtomicCheckpointIO(background=1)


def test_saves_after_teardown_are_synchronous_until_the_next_run(path, background, gate):
    """As after an error within an epoch."""
    gate.set()
    background.save_checkpoint(OLD | after(3), path)
    background.teardown()
    for _ in range(2):
        background.save_checkpoint(NEW | after(3), path)
        assert torch.load(path)["step"] == 2
        with files_of_at_most(2**20), pytest.raises(OSError, match="could not be written"):
            background.save_checkpoint(NEW | after(3), path)
    gate.clear()
    for batches in (4, 3):  # of other runs
        background.save_checkpoint(NEW | after(batches), path.with_name("next.ckpt"))
        assert names(path)[-1:] == ["last.ckpt"]
        gate.set()
        background.load_checkpoint(path)
        background.remove_checkpoint(path.with_name("next.ckpt"))
        gate.clear()


class Refuses:
    """Raises its own error when it is pickled."""

    def __reduce__(self):
        raise RuntimeError("holds an open connection")


def test_an_error_of_a_saved_object_is_raised_unchanged(path):
    io = AtomicCheckpointIO()
    io.save_checkpoint({"step": 1}, path)
    with pytest.raises(RuntimeError, match=r"^holds an open connection$"):
        io.save_checkpoint({"step": Refuses()}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert names(path) == [path.name]
