"""DALILoader over ready pipelines and over pipelines that the user wrote: epochs, shards, state, errors."""

import copy
import gc
import itertools
import os
import pickle
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("nvidia.dali")
from nvidia.dali import Pipeline, fn, pipeline_def, types

from lightning_turbo import DALILoader, _optional
from lightning_turbo.data.dali import ImageFolder
from lightning_turbo.errors import MissingExtraError
from tests.dali_samples import make_photos

COUNT = 21


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("photos"), per_class=7, suffixes=(".jpg",))


@pytest.fixture(scope="module")
def files(root):
    return sorted(str(path) for path in root.rglob("*.jpg"))


@pipeline_def
def photos(files, shard_id, num_shards, shuffle=True, pad=True, stick=False):
    """Random crops, a constant class, and the number of each photograph."""
    encoded, number = fn.readers.file(
        files=files, labels=list(range(len(files))), shard_id=shard_id, num_shards=num_shards, random_shuffle=shuffle,
        initial_fill=16, pad_last_batch=pad, stick_to_shard=stick, name="photos",
    )  # fmt: skip
    image = fn.decoders.image_random_crop(encoded, output_type=types.RGB)
    return fn.resize(image, size=(8, 8)), number // 7, number


@pytest.fixture(params=["ready", "written"])
def make(request, root, files):
    """Makes loaders of batches (image, label, number) over the same photographs."""

    def maker(batch_size=4, arguments=(), **kwargs):
        settings = {"num_threads": 1, "seed": 5, **kwargs}
        if request.param == "ready":
            return DALILoader(ImageFolder(root, train=True, size=8, index=True), batch_size, **settings)
        return DALILoader(photos, batch_size, arguments={"files": files, **dict(arguments)}, **settings)

    return maker


@pytest.fixture
def loader(make):
    loader = make()
    yield loader
    loader.close()


def numbers(batches):
    return torch.cat([batch[2] for batch in batches]).tolist()


def same(first, second):
    return len(first) == len(second) and all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("last_batch", "sizes"), [("partial", [4] * 5 + [1]), ("fill", [4] * 6), ("Drop", [4] * 5)])
def test_length_coverage_and_order(make, last_batch, sizes):
    loader, again, other = make(last_batch=last_batch), make(last_batch=last_batch), make(seed=6)
    orders = []
    for _ in range(3):
        batches = list(loader)
        assert len(loader) == len(batches)
        assert [len(label) for _, label, _ in batches] == sizes
        assert all(part.dtype == torch.int64 and part.ndim == 1 for batch in batches for part in batch[1:])
        assert all(torch.equal(label, number // 7) for _, label, number in batches)
        assert same(list(again), batches)
        orders.append(numbers(batches))
        assert len(set(orders[-1])) == min(COUNT, sum(sizes))
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert numbers(other) != orders[0]
    for each in (loader, again, other):
        each.close()


@pytest.mark.parametrize(("batch_size", "world"), [(1, 2), (4, 2), (5, 2), (1, 4), (4, 4), (2, 3)])
def test_shards_cover_everything_and_steps_agree(make, batch_size, world):
    ranks = [make(batch_size, rank=rank, world_size=world) for rank in range(world)]
    for _ in range(3):
        epochs = [list(loader) for loader in ranks]
        assert {len(epoch) for epoch in epochs} == {len(ranks[0])}
        seen = list(itertools.chain.from_iterable(map(numbers, epochs)))
        assert set(seen) == set(range(COUNT))
        assert len(seen) <= COUNT + world - 1  # a rank whose last batch would be empty repeats one
        assert all(len(label) for epoch in epochs for _, label, _ in epoch)
    for loader in ranks:
        loader.close()


def test_a_reader_that_keeps_its_shard(files):
    given = {"files": files, "stick": True}
    ranks = [DALILoader(photos, 4, arguments=given, num_threads=1, rank=r, world_size=2) for r in range(2)]
    for _ in range(2):
        assert sorted(itertools.chain.from_iterable(map(numbers, ranks))) == list(range(COUNT))
    for loader in ranks:
        loader.close()


def test_every_iteration_begins_at_the_beginning(loader):
    firsts = []
    for taken in (1, 2, 5):
        batches = iter(loader)
        firsts.append(next(batches)[2].tolist())
        list(itertools.islice(batches, taken - 1))
        with pytest.raises(ZeroDivisionError):
            _ = [1 / 0 for _ in loader]
        assert sorted(numbers(loader)) == list(range(COUNT))
    assert firsts[0] != firsts[1] != firsts[2]


def test_set_epoch_names_the_epoch_although_it_comes_after_iter(make):
    first, second, counted = make(), make(), make()
    batches = iter(first)
    first.batch_sampler.sampler.set_epoch(3)  # as Lightning does it
    second.set_epoch(3)
    assert same(list(batches), list(second))
    assert first.epoch == 3
    assert numbers(counted) != numbers(second)
    for each in (first, second, counted):
        each.close()


@pytest.mark.parametrize("last_batch", ["partial", "drop"])
@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_resumed_it_yields_what_was_not_seen_bit_for_bit(make, last_batch, epoch, at):
    loader = make(last_batch=last_batch)
    for _ in range(epoch):
        list(loader)
    batches = iter(loader)
    for _ in range(at):
        next(batches)
        loader.state_dict()  # saving changes nothing
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    rest = list(batches) if at < len(loader) else []
    following = list(loader)
    loader.close()
    other = make(last_batch=last_batch, seed=99)  # the saved seed counts
    other.load_state_dict(state)
    assert other.state_dict() == state
    if rest:
        assert same(list(other), rest)
    assert same(list(other), following)
    other.close()


def test_a_loaded_state_of_another_epoch_gives_way_to_set_epoch(make, loader):
    """A checkpoint of the end of an epoch that ``limit_train_batches`` cut short, and one of a finished epoch."""
    next(iter(loader))
    state = loader.state_dict()
    loader.set_epoch(1)
    expected = list(loader)
    other = make()
    other.load_state_dict(state)
    other.set_epoch(1)
    assert same(list(other), expected)
    ended = other.state_dict()
    other.load_state_dict(ended)
    other.set_epoch(1)
    assert list(other) == []
    other.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 7}, "batch 1 of 6 and was saved with batch_size=4, now it is 7"),
        ({"last_batch": "fill"}, "saved with last_batch='partial', now it is 'fill'"),
        ({"rank": 0, "world_size": 2}, r"saved with world_size=1, now it is 2\. Resume with world_size=1, or from"),
    ],
)
def test_other_sizes_are_refused_in_mid_epoch_and_taken_at_its_end(make, loader, changed, message):
    other, twin = make(**changed), make(**changed)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(loader.state_dict())
    list(batches)
    other.load_state_dict(loader.state_dict())
    twin.set_epoch(1)
    assert same(list(other), list(twin))
    assert other.epoch == 1
    other.close()
    twin.close()


def test_a_state_without_a_checkpoint_is_refused_in_mid_epoch(loader):
    next(iter(loader))
    loader.close()
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="no checkpoint of the pipeline at batch 1 of epoch 0"):
        next(iter(loader))


def test_batches_outlive_the_loader_and_close_releases_the_pipeline(make):
    loader = make(prefetch=1)
    batches = list(loader)
    values = [images.clone() for images, *_ in batches]
    list(loader)
    pipeline = weakref.ref(loader._built)
    loader.close()
    gc.collect()
    assert pipeline() is None
    assert not loader.built
    assert all(torch.equal(images, value) for (images, *_), value in zip(batches, values, strict=True))
    assert sorted(numbers(loader)) == list(range(COUNT))
    assert loader.epoch == 2
    loader.close()


def test_two_iterations_at_once_are_refused(loader):
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="ended when another one began"):
        next(first)
    loader.close()
    with pytest.raises(RuntimeError, match="or when it was closed"):
        next(second)


def test_copies_and_pickles_build_for_themselves(make, loader):
    next(iter(loader))
    twins = [copy.deepcopy(loader)] + ([pickle.loads(pickle.dumps(loader))] if loader.pipeline is not photos else [])
    expected = list(loader)
    for twin in twins:
        assert not twin.built
        assert same(list(twin), expected)
        twin.close()


def test_names_make_dictionaries_and_the_queue_depth_changes_nothing(make, loader):
    named = make(outputs=("x", "y", "n"), prefetch=4)
    for batch, plain in zip(named, loader, strict=True):
        assert list(batch) == ["x", "y", "n"]
        assert all(torch.equal(a, b) for a, b in zip(batch.values(), plain, strict=True))
    named.close()


# Sources and outputs of pipelines that the user wrote.


@pipeline_def
def counted():
    """A source without a reader: DALI's external source, three batches an epoch."""

    def source(info):
        if info.iteration >= 3:
            raise StopIteration
        return [np.array([info.iteration * 2 + n, info.epoch_idx], dtype=np.float32) for n in range(2)]

    return fn.external_source(source=source, batch=True, batch_info=True)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_source_with_an_announced_length_resumes(at):
    loader = DALILoader(counted, 2, batches=3, num_threads=1)
    for epoch in range(2):
        batches = list(loader)
        assert [batch[:, 0].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
        assert {float(v) for batch in batches for v in batch[:, 1]} == {epoch}
    batches = iter(loader)
    for _ in range(at):
        next(batches)
    state = loader.state_dict()
    rest = list(batches) or list(loader)
    loader.close()
    other = DALILoader(counted, 2, batches=3, num_threads=1)
    other.load_state_dict(state)
    assert torch.equal(torch.stack(list(other)), torch.stack(rest))
    other.close()


def test_a_source_that_ends_too_soon_is_refused():
    loader = DALILoader(counted, 2, batches=5, num_threads=1)
    with pytest.raises(ValueError, match="The pipeline ended after 3 batches of 5"):
        list(loader)
    loader.close()


@pytest.mark.parametrize("cycle", [None, "raise"])
def test_a_source_has_to_begin_again(cycle):
    @pipeline_def
    def graph():
        return fn.external_source(source=[np.full((2, 3), k, np.float32) for k in range(3)], batch=True, cycle=cycle)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # DALI's, of what its checkpoints do not hold
        loader = DALILoader(graph, batch_size=2, batches=3, num_threads=1)
        assert [batch[0, 0].item() for batch in loader] == [0, 1, 2]
        if cycle is None:
            with pytest.raises(ValueError, match=r"ended after 0 batches of 3.* begin again: .*cycle='raise'"):
                list(loader)
        else:
            assert [batch[0, 0].item() for batch in loader] == [0, 1, 2]
        loader.close()


@pipeline_def
def many(shard_id=0, num_shards=1, device="none", order_seed=None):
    """Outputs of every kind, to see which are taken for labels."""
    data = fn.external_source(source=lambda: [np.float32([1, 2])] * 3, batch=True)
    one_int = fn.external_source(source=lambda: np.full((3, 1), 7, dtype=np.int32), batch=True)
    scalar = fn.external_source(source=lambda: np.full((3,), 7, dtype=np.uint8), batch=True)
    two_ints = fn.external_source(source=lambda: np.full((3, 2), 7, dtype=np.int32), batch=True)
    one_float = fn.external_source(source=lambda: np.full((3, 1), 0.5, dtype=np.float32), batch=True)
    filled = device == "cpu" and isinstance(order_seed, int)
    return (
        data,
        one_int,
        scalar,
        two_ints,
        one_float,
        fn.external_source(source=lambda: np.full((3,), filled), batch=True),
    )


@pytest.mark.filterwarnings("ignore:Checkpointing enabled in a pipeline with external source")
def test_one_integer_a_sample_is_a_label():
    loader = DALILoader(many, 3, batches=1, num_threads=1)
    ((data, one_int, scalar, two_ints, one_float, filled),) = loader
    assert data.shape == (3, 2)
    assert (one_int.shape, one_int.dtype) == (scalar.shape, scalar.dtype) == ((3,), torch.int64)
    assert (two_ints.shape, two_ints.dtype) == ((3, 2), torch.int32)
    assert (one_float.shape, one_float.dtype) == ((3, 1), torch.float32)
    assert filled.tolist() == [True] * 3  # the loader filled in the device and the seed
    loader.close()


@pipeline_def
def ragged(files):
    """Images of their own sizes, which make no batch."""
    encoded, labels = fn.readers.file(files=files, labels=list(range(len(files))), pad_last_batch=True, name="r")
    return fn.decoders.image(encoded), labels


@pipeline_def
def two_readers(files):
    first, _ = fn.readers.file(files=files, pad_last_batch=True, name="first")
    second, _ = fn.readers.file(files=files[:8], pad_last_batch=True, name="second")
    return first.shape()[0], second.shape()[0]


@pytest.mark.parametrize(
    ("definition", "message", "kwargs"),
    [
        (ragged, "must be representable as a tensor - it must have uniform shape", {}),
        (photos, r"batches=3, and the pipeline has the readers \['photos'\]", {"batches": 3}),
        (two_readers, r"has the readers \['first', 'second'\]", {}),
        (two_readers, r"reader='third': the pipeline has the readers", {"reader": "third"}),
        (photos, "pad_last_batch=False, and 21 samples are not a multiple", {"arguments": {"pad": False}}),
        (photos, "last_batch='drop' leaves no batch: 21 samples", {"batch_size": 22, "last_batch": "drop"}),
        (photos, "number of input samples: 21, needs", {"rank": 0, "world_size": 22}),
        (ragged, "'r' has num_shards=1 and shard_id=0, but this is rank 1 of 2", {"rank": 1, "world_size": 2}),
        (photos, "are 2 names, but the pipeline has 3 outputs", {"outputs": ("a", "b")}),
    ],
)
def test_pipelines_that_cannot_be_used_are_refused(files, definition, message, kwargs):
    arguments = {"files": files, **kwargs.pop("arguments", {})}
    loader = DALILoader(definition, **{"batch_size": 4, "num_threads": 1, "arguments": arguments, **kwargs})
    with pytest.raises((ValueError, RuntimeError), match=message):
        next(iter(loader))
    loader.close()


def test_the_reader_that_counts_can_be_chosen_and_need_not_pad(files):
    loader = DALILoader(two_readers, 4, num_threads=1, arguments={"files": files}, reader="second")
    assert len(loader) == 2
    loader.close()
    loader = DALILoader(photos, 7, num_threads=1, arguments={"files": files, "pad": False})
    for _ in range(2):
        assert sorted(numbers(loader)) == list(range(COUNT))
    loader.close()


def test_an_error_of_the_pipeline_leaves_the_loader_usable(files, tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    arguments = {"files": [*files[:4], str(bad), *files[5:]], "shuffle": False}
    loader = DALILoader(photos, 4, arguments=arguments, num_threads=1)
    batches = iter(loader)
    next(batches)
    with pytest.raises(RuntimeError, match=r"nvImageCodec failure|decode"):
        next(batches)
    bad.write_bytes(Path(files[4]).read_bytes())
    assert sorted(numbers(loader)) == list(range(COUNT))
    loader.close()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size=0: expected a whole number, at least 1"),
        ({"batch_size": 2.0}, TypeError, "batch_size=2.0: expected a whole number"),
        ({"batch_size": True}, TypeError, "batch_size=True: expected a whole number"),
        ({"num_threads": 0}, ValueError, "num_threads=0"),
        ({"prefetch": None}, TypeError, "prefetch=None"),
        ({"seed": -1}, ValueError, "seed=-1: expected a whole number, at least 0"),
        ({"rank": 0}, ValueError, "rank=0, world_size=None: pass both or none"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank below world_size"),
        ({"last_batch": "keep"}, ValueError, "last_batch='keep': expected 'fill', 'drop' or 'partial'"),
        ({"device": "tpu"}, RuntimeError, "(?i)expected one of cpu, cuda"),
        ({"device": "meta"}, ValueError, "DALI fills the memory of 'cpu' and 'cuda' only"),
        ({"outputs": "image"}, ValueError, "outputs='image': expected a sequence with a name of its own for each"),
        ({"outputs": ("a", "a", "b")}, ValueError, "expected a sequence with a name of its own for each output"),
        ({"outputs": ("a", "b")}, ValueError, "are 2 names, but the pipeline has 3 outputs"),
        ({"reader": "r"}, ValueError, "arguments, reader and batches are for a pipeline function"),
        ({"pipeline": "images"}, TypeError, "expected a ready pipeline such as ImageFolder"),
        ({"pipeline": print}, TypeError, "expected a ready pipeline such as ImageFolder"),
        ({"pipeline": type("Hybrid", (Pipeline,), {})}, TypeError, "its define_graph becomes that function"),
        (
            {"pipeline": photos, "arguments": {"files": [], "x": 1}},
            TypeError,
            r"takes no \['x'\], but \['files', 'shard_id'",
        ),
        ({"pipeline": counted}, ValueError, "batches=None, and the pipeline has the readers .*: pass batches="),
        ({"rank": 0, "world_size": 22}, ValueError, "21 files for 22 ranks"),
    ],
)
def test_wrong_arguments_are_refused(root, wrong, error, message):
    with pytest.raises(error, match=message):
        len(DALILoader(**{"pipeline": ImageFolder(root, train=True, index=True), "batch_size": 4, **wrong}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused():
    with pytest.raises(ValueError, match="device='cuda', but torch sees no CUDA device"):
        DALILoader(counted, 4, device="cuda")


def test_without_dali_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(_optional, "installed_version", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"DALILoader needs the package nvidia-dali.*lightning-turbo\[dali\]"):
        DALILoader(counted, 4)


def test_the_seed_is_lightnings_and_the_ranks_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert DALILoader(counted, 5).seed == 7
    monkeypatch.delenv("PL_GLOBAL_SEED")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    loader, own = DALILoader(counted, 4), DALILoader(counted, 4, num_threads=5)
    assert (loader.seed, loader.num_threads, own.num_threads) == (0, 8, 5)
    for here, threads in ((1, 8), (4, 3), (16, 1)):
        for each in (loader, own):
            each.place("cpu", 0, 16, here)
        assert (loader.num_threads, own.num_threads) == (threads, 5)
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "6")  # torchrun's, for loops without a Trainer
        assert DALILoader(counted, 4).num_threads == 2
