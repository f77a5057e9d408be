"""DALILoader over ready pipelines: epochs, what is left over, state, arguments and what is refused."""

import copy
import gc
import os
import pickle
import weakref

import numpy as np
import pytest
import torch

from lightning_turbo import DALILoader, _optional
from lightning_turbo.data.dali import FileRecipe, ImageFolder
from lightning_turbo.data.dali.engine import check_device, check_driver
from lightning_turbo.errors import MissingExtraError
from tests.dali_samples import make_photos


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"))  # 24 images


@pytest.fixture
def recipe(photos):
    return ImageFolder(photos, train=True, size=16, index=True)


def make(recipe, batch_size=5, **kwargs):
    return DALILoader(recipe, batch_size, **{"num_threads": 1, "seed": 7, **kwargs})


def numbers(batches):
    return torch.cat([batch[2] for batch in batches]).tolist()


def same(first, second):
    return len(first) == len(second) and all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def epochs(recipe):
    """Three epochs of an undisturbed run."""
    loader = make(recipe)
    result = [list(loader) for _ in range(3)]
    loader.close()
    return result


@pytest.mark.parametrize(("last_batch", "sizes"), [("partial", [5] * 4 + [4]), ("fill", [5] * 5), ("drop", [5] * 4)])
def test_length_and_coverage(recipe, last_batch, sizes):
    loader = make(recipe, last_batch=last_batch)
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader)
        assert [len(labels) for _, labels, _ in batches] == sizes
        seen = numbers(batches)
        assert len(set(seen)) == min(24, len(seen))
    loader.close()


def test_each_epoch_has_an_order_of_its_own_and_the_seed_decides(recipe, epochs):
    orders = [numbers(epoch) for epoch in epochs]
    assert [sorted(order) for order in orders] == [list(range(24))] * 3
    assert orders[0] != orders[1] != orders[2] != orders[0]
    again = make(recipe)
    assert same(list(again), epochs[0])
    other = make(recipe, seed=8)
    assert numbers(list(other)) != orders[0]
    again.close()
    other.close()


def test_the_seed_is_lightnings(recipe, epochs, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    loader = DALILoader(recipe, 5, num_threads=1)
    assert loader.seed == 7
    assert same(list(loader), epochs[0])
    loader.close()
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert DALILoader(recipe, 5).seed == 0


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 5])
def test_after_a_part_of_an_epoch_the_next_begins_at_its_beginning(recipe, epochs, taken):
    loader = make(recipe)
    batches = iter(loader)
    left = [next(batches) for _ in range(taken)]
    assert same(left, epochs[0][:taken])
    rest = epochs[1] if taken else epochs[0]
    assert same(list(loader), rest)
    loader.close()


def test_an_exception_in_the_loop_leaves_the_next_epoch_whole(recipe, epochs):
    loader = make(recipe)
    batches = iter(loader)
    with pytest.raises(ZeroDivisionError):
        _ = [1 / (2 - place) for place, _ in enumerate(batches)]
    assert same(list(loader), epochs[1])
    loader.close()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_queue_depth_changes_nothing(recipe, epochs, depth):
    loader = make(recipe, prefetch=depth, num_threads=2)
    assert same(list(loader), epochs[0])
    batches = iter(loader)
    next(batches)
    assert same(list(loader), epochs[2])
    loader.close()


def test_set_epoch_names_the_epoch(recipe, epochs):
    loader = make(recipe)
    loader.set_epoch(2)
    assert same(list(loader), epochs[2])
    assert loader.epoch == 2
    loader.batch_sampler.sampler.set_epoch(1)  # as Lightning does it
    assert same(list(loader), epochs[1])
    loader.close()


def test_set_epoch_counts_although_it_comes_after_iter(recipe, epochs):
    loader = make(recipe)
    batches = iter(loader)
    loader.set_epoch(1)
    assert same(list(batches), epochs[1])
    loader.close()


@pytest.mark.parametrize("at", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("epoch", [0, 1])
def test_resumed_it_yields_what_was_not_seen(recipe, epochs, at, epoch):
    loader = make(recipe)
    for _ in range(epoch):
        list(loader)
    batches = iter(loader)
    for _ in range(at):
        next(batches)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    loader.close()

    other = make(recipe, seed=99)  # the saved seed counts
    other.load_state_dict(state)
    assert other.state_dict() == state
    expected = epochs[epoch][at:] if at < 5 else epochs[epoch + 1]
    assert same(list(other), expected)
    other.close()


def test_saving_changes_nothing(recipe, epochs):
    loader = make(recipe)
    result = []
    for batch in loader:
        loader.state_dict()
        result.append(batch)
    assert same(result, epochs[0])
    loader.close()


def test_a_loaded_state_of_another_epoch_gives_way_to_set_epoch(recipe, epochs):
    """A checkpoint of the end of an epoch that ``limit_train_batches`` cut short."""
    loader = make(recipe)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    other = make(recipe)
    other.load_state_dict(state)
    other.set_epoch(1)
    assert same(list(other), epochs[1])
    other.load_state_dict(state)
    other.set_epoch(0)
    assert same(list(other), epochs[0][1:])
    other.close()


def test_a_finished_epoch_that_is_asked_for_again_has_nothing_left(recipe):
    loader = make(recipe)
    list(loader)
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert list(loader) == []
    loader.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 4}, "saved with batches=5, now it is 6"),
        ({"last_batch": "fill"}, "saved with last_batch='partial', now it is 'fill'"),
        ({"rank": 0, "world_size": 2}, "saved with batches=5, now it is 3"),
    ],
)
def test_a_state_of_other_sizes_is_refused(recipe, changed, message):
    state = make(recipe).state_dict()
    with pytest.raises(ValueError, match=message):
        make(recipe, **changed).load_state_dict(state)


def test_batches_outlive_the_loader(recipe):
    loader = make(recipe, prefetch=1)
    batches = list(loader)
    values = [images.clone() for images, _, _ in batches]
    for _ in range(3):
        list(loader)
    loader.close()
    del loader
    gc.collect()
    assert all(torch.equal(images, value) for (images, _, _), value in zip(batches, values, strict=True))


def test_close_releases_the_pipeline_and_the_loader_goes_on(recipe, epochs):
    loader = make(recipe)
    list(loader)
    pipeline = weakref.ref(loader._stream._engine.pipeline)
    loader.close()
    gc.collect()
    assert pipeline() is None
    assert not loader.built
    assert same(list(loader), epochs[1])
    loader.close()


def test_two_iterations_at_once_are_refused(recipe):
    loader = make(recipe)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="ended when another one began"):
        next(first)
    loader.close()
    with pytest.raises(RuntimeError, match="or when it was closed"):
        next(second)


def test_copies_and_pickles_build_for_themselves(recipe, epochs):
    loader = make(recipe)
    list(loader)
    for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert not twin.built
        assert same(list(twin), epochs[1])
        twin.close()
    loader.close()


def test_names_make_dictionaries(recipe):
    loader = make(recipe, outputs=("x", "y", "n"))
    batch = next(iter(loader))
    assert list(batch) == ["x", "y", "n"]
    assert batch["y"].shape == (5,)
    loader.close()


class Raw(FileRecipe):
    """A recipe as a user writes it: the first bytes of each file, and a number that is drawn."""

    def draw(self, generator, batch):
        return {"number": generator.random(batch, dtype=np.float32)}

    def define(self, dali, encoded, device, number):
        return dali.fn.stack(dali.fn.cast(encoded[0], dtype=dali.types.FLOAT), number)


@pytest.mark.parametrize(
    ("files", "labels", "message"),
    [
        ([], None, r"files=\[\]: give a sequence of paths, at least one"),
        ("a.jpg", None, "files='a.jpg': give a sequence of paths"),
        (["a.jpg", "b.jpg"], [1], "1 labels for 2 files: give one for each file, or None"),
    ],
)
def test_a_recipe_needs_files_and_their_labels(files, labels, message):
    with pytest.raises(ValueError, match=message):
        Raw(files, labels, shuffle=True, index=True)


def test_a_recipe_of_ones_own(photos):
    files = sorted(str(path) for path in photos.rglob("*.jpg"))
    loader = make(Raw(files, None, shuffle=True, index=True), 4)
    batches = list(loader)
    assert all((values[:, 0] == 0xFF).all() for values, _ in batches)  # how a JPEG begins
    assert len({float(v) for values, _ in batches for v in values[:, 1]}) == 12
    loader.close()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size=0: give a whole number, at least 1"),
        ({"batch_size": 2.0}, TypeError, "batch_size=2.0: give a whole number"),
        ({"batch_size": True}, TypeError, "batch_size=True: give a whole number"),
        ({"num_threads": 0}, ValueError, "num_threads=0"),
        ({"prefetch": 0}, ValueError, "prefetch=0"),
        ({"prefetch": None}, TypeError, "prefetch=None"),
        ({"seed": -1}, ValueError, "seed=-1: give a whole number, at least 0"),
        ({"rank": 0}, ValueError, "rank=0, world_size=None: give both or none"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank below world_size"),
        ({"last_batch": "keep"}, ValueError, "last_batch='keep'"),
        ({"device": "tpu"}, ValueError, "device='tpu' is no device"),
        ({"device": "meta"}, ValueError, "DALI fills the memory of 'cpu' and 'cuda' only"),
        ({"outputs": 3}, TypeError, "outputs=3: give the names of the outputs as a sequence"),
        ({"outputs": "image"}, TypeError, "give the names of the outputs as a sequence"),
        ({"outputs": ("a", 3, "b")}, TypeError, "sequence of strings"),
        ({"outputs": ("a", "a", "b")}, ValueError, "give each output a name of its own"),
        ({"outputs": ("a", "b")}, ValueError, "are 2 names, but the pipeline has 3 outputs"),
        ({"reader": "r"}, ValueError, "arguments, reader and batches are for a pipeline function"),
        ({"batches": 3}, ValueError, "arguments, reader and batches are for a pipeline function"),
    ],
)
def test_wrong_arguments_are_refused(recipe, wrong, error, message):
    with pytest.raises(error, match=message):
        DALILoader(**{"pipeline": recipe, "batch_size": 4, **wrong})


@pytest.mark.parametrize("wrong", ["images", None, print, 3])
def test_what_is_no_pipeline_is_refused(wrong):
    with pytest.raises(TypeError, match="give a ready pipeline such as ImageFolder"):
        DALILoader(wrong, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(recipe):
    with pytest.raises(ValueError, match="device='cuda', but torch sees no CUDA device"):
        DALILoader(recipe, 4, device="cuda")


def test_fewer_files_than_ranks_are_refused(photos):
    few = ImageFolder(photos / "brick", train=False, labelled=False)
    with pytest.raises(ValueError, match="8 files for 9 ranks"):
        len(DALILoader(few, 4, rank=0, world_size=9))


def test_without_dali_the_error_names_the_extra(recipe, monkeypatch):
    monkeypatch.setattr(_optional, "installed_version", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"DALILoader needs the package nvidia-dali.*lightning-turbo\[dali\]"):
        DALILoader(recipe, 4)


def test_an_old_driver_is_named():
    with pytest.raises(RuntimeError, match="built for CUDA 13, but the driver supports CUDA 12"):
        check_driver(13000, driver=12080)
    with pytest.raises(RuntimeError, match="built for CUDA 12, but the driver could not be loaded"):
        check_driver(12086, driver=0)
    check_driver(12986, driver=12020)
    check_driver(12986, driver=13000)


def test_the_ranks_of_a_machine_share_its_cores(recipe, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    loader, own = DALILoader(recipe, 4), DALILoader(recipe, 4, num_threads=5)
    assert (loader.num_threads, own.num_threads) == (8, 5)
    for here, threads in ((1, 8), (4, 3), (16, 1)):
        for each in (loader, own):
            each.place("cpu", 0, 16, here)
        assert (loader.num_threads, own.num_threads) == (threads, 5)
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "6")  # torchrun's, for loops without a Trainer
        assert DALILoader(recipe, 4).num_threads == 2


def test_devices():
    assert check_device(None) == torch.device("cpu")
    assert check_device(torch.device("cpu")).type == "cpu"
