"""DALILoader over ImageFolder and over pipelines that the user wrote: epochs, shards, state, errors."""

import copy
import gc
import itertools
import math
import os
import pickle
import random
import weakref

import pytest
import torch

pytest.importorskip("nvidia.dali")
import nvidia.dali.experimental.dynamic as dynamic
from nvidia.dali import Pipeline, fn, pipeline_def, types

from lightning_turbo import DALILoader
from lightning_turbo.data import DevicePrefetcher
from lightning_turbo.data.dali import DynamicPipeline, ImageFolder
from lightning_turbo.data.dali import loader as dali_loader
from lightning_turbo.data.dali.pipelines import Placement, explained
from tests.dali_samples import make_photos
from tests.integration.resuming import assert_same

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


def read_photos(files, shard_id, num_shards, order_seed, shuffle=True, pad=True, stick=False):
    """The reader of ``photos`` in dynamic mode."""
    return dynamic.readers.File(
        files=files, labels=list(range(len(files))), shard_id=shard_id, num_shards=num_shards, random_shuffle=shuffle,
        initial_fill=16, pad_last_batch=pad, stick_to_shard=stick, seed=order_seed, enable_checkpointing=True,
    )  # fmt: skip


def process_photos(encoded, number, device, rng):
    image = dynamic.decoders.image_random_crop(encoded, output_type=types.RGB, device=device, rng=rng)
    return dynamic.resize(image, size=(8, 8)), number // 7, number


@pytest.fixture(params=["ready", "written", "dynamic"])
def make(request, root, files):
    """Makes loaders of batches (image, label, number) over the same photographs."""

    def maker(batch_size=4, arguments=(), **kwargs):
        settings = {"num_threads": 1, "seed": 5, **kwargs}
        if request.param == "ready":
            return DALILoader(ImageFolder(root, train=True, size=8, index=True), batch_size, **settings)
        pipeline = photos if request.param == "written" else DynamicPipeline(read_photos, process_photos)
        return DALILoader(pipeline, batch_size, arguments={"files": files, **dict(arguments)}, **settings)

    return maker


@pytest.fixture
def loader(make):
    loader = make()
    yield loader
    loader.close()


def numbers(batches):
    return torch.cat([batch[2] for batch in batches]).tolist()


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4] * 5 + [1]), (True, [4] * 5)])
def test_length_coverage_and_order(make, drop_last, sizes):
    loader, again, other = make(drop_last=drop_last), make(drop_last=drop_last), make(seed=6)
    orders = []
    for _ in range(3):
        batches = list(loader)
        assert len(loader) == len(batches)
        assert [len(label) for _, label, _ in batches] == sizes
        assert all(part.dtype == torch.int64 and part.ndim == 1 for batch in batches for part in batch[1:])
        assert all(torch.equal(label, number // 7) for _, label, number in batches)
        assert_same(list(again), batches)
        orders.append(numbers(batches))
        assert len(set(orders[-1])) == min(COUNT, sum(sizes))
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert numbers(other) != orders[0]
    for each in (loader, again, other):
        each.close()


@pytest.mark.parametrize(("batch_size", "world", "stick"), [(1, 2, False), (4, 4, False), (4, 2, True)])
def test_shards_cover_everything_and_steps_agree(make, batch_size, world, stick):
    ranks = [make(batch_size, {"stick": stick}, rank=rank, world_size=world) for rank in range(world)]
    for _ in range(3):
        epochs = [list(loader) for loader in ranks]
        assert {len(epoch) for epoch in epochs} == {len(ranks[0])}
        seen = list(itertools.chain.from_iterable(map(numbers, epochs)))
        assert set(seen) == set(range(COUNT))
        assert len(seen) <= COUNT + world - 1  # a rank whose last batch would be empty repeats one
        assert all(len(label) for epoch in epochs for _, label, _ in epoch)
    for loader in ranks:
        loader.close()


def test_each_rank_resumes_in_its_shard(make):
    ranks = [make(2, rank=rank, world_size=2) for rank in (0, 1)]
    for loader in ranks:
        list(loader)  # DALI gives each rank another shard in the next epoch
    iterators = [iter(loader) for loader in ranks]
    for batches in iterators:
        next(batches)
    states = [loader.state_dict() for loader in ranks]
    gathered = {rank: state["pipelines"][rank] for rank, state in enumerate(states)}  # as ranks do it for one another
    for rank, (state, batches) in enumerate(zip(states, iterators, strict=True)):
        other = make(2, rank=rank, world_size=2)
        other.load_state_dict({**state, "pipelines": gathered})
        assert_same(list(other), list(batches))
        other.close()
        ranks[rank].close()


def test_every_iteration_begins_at_the_beginning_of_the_epoch_that_set_epoch_names(make, root):
    loader, other = make(), make()
    firsts = []
    for taken in (1, 2, 5):
        batches = iter(loader)
        firsts.append(next(batches)[2].tolist())
        list(itertools.islice(batches, taken - 1))
        assert sorted(numbers(loader)) == list(range(COUNT))
    assert firsts[0] != firsts[1] != firsts[2]
    loader.close()
    batches = iter(loader)
    loader.batch_sampler.sampler.set_epoch(9)  # as Lightning does it, after iter
    other.set_epoch(9)
    assert_same([next(batches)], [next(iter(other))])
    assert loader.epoch == 9
    loader.close()
    other.close()
    ordered = DALILoader(ImageFolder(root, train=True, shuffle=False, size=8), 4, num_threads=1)
    (first, _), (second, _) = next(iter(ordered)), next(iter(ordered))
    assert not torch.equal(first, second)  # another augmentation, although the epoch was cut short
    ordered.close()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("epoch", "at"), [(0, 0), (0, 3), (2, 1), (2, 5)])
def test_resumed_it_yields_what_was_not_seen_bit_for_bit(make, drop_last, epoch, at):
    loader = make(drop_last=drop_last)
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
    other = make(drop_last=drop_last, seed=99)  # the saved seed counts
    other.load_state_dict(state)
    assert other.state_dict() == state
    if rest:
        assert_same(list(other), rest)
    assert_same(list(other), following)
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
    assert_same(list(other), expected)
    ended = other.state_dict()
    other.load_state_dict(ended)
    other.set_epoch(1)
    assert list(other) == []
    next(iter(loader))
    loader.close()
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"with a checkpoint of the pipeline: .*got 'batch 1 of epoch 2'"):
        next(iter(other))
    other.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 7}, r"'batch_size': 4, .*saved at batch 1 of 6, got {'batch_size': 7"),
        ({"drop_last": True}, "Expected {'drop_last': False, 'batches': 6}, .*got {'drop_last': True, 'batches': 5}"),
        (
            {"rank": 0, "world_size": 2},
            r"Expected {'world_size': 1.*got {'world_size': 2.*or resume from a checkpoint at an epoch's end",
        ),
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
    assert_same(list(other), list(twin))
    assert other.epoch == 1
    other.close()
    twin.close()


def test_batches_outlive_the_loader_and_close_releases_the_pipeline(make):
    loader = make(prefetch=1)
    written = not isinstance(loader.pipeline, ImageFolder)
    source = DevicePrefetcher(loader, "cpu", transform=lambda batch: batch) if written else loader
    batches = list(source)
    values = [images.clone() for images, *_ in batches]
    next(iter(source))
    pipeline = weakref.ref(loader._built)
    loader.close()
    gc.collect()
    assert pipeline() is None
    assert not loader.built
    assert all(torch.equal(images, value) for (images, *_), value in zip(batches, values, strict=True))
    assert sorted(numbers(loader)) == list(range(COUNT))
    assert loader.epoch == 2
    loader.close()


def test_copies_build_for_themselves_and_two_iterations_at_once_are_refused(loader):
    first = iter(loader)
    next(first)
    twin = copy.deepcopy(loader)
    if isinstance(loader.pipeline, ImageFolder):
        twin = pickle.loads(pickle.dumps(loader))
    assert not twin.built
    second = iter(loader)
    batches = [next(second)]
    with pytest.raises(RuntimeError, match="another one has started"):
        next(first)
    assert_same([next(iter(twin))], batches)
    loader.close()
    with pytest.raises(RuntimeError, match="or the loader was closed"):
        next(second)
    twin.close()


@pipeline_def
def many(files, count, shard_id=0, num_shards=1, device="none", order_seed=None):
    """Outputs of every kind, and two readers."""
    shard = {"shard_id": shard_id, "num_shards": num_shards, "pad_last_batch": True}
    _, number = fn.readers.file(files=files, name="first", labels=list(range(len(files))), **shard)
    _, other = fn.readers.file(files=files[:count], name="second", labels=[7] * count, **shard)
    filled = types.Constant([int(device == "cpu" and isinstance(order_seed, int))], dtype=types.BOOL)
    kinds = [fn.cast(number, dtype=kind) for kind in (types.FLOAT, types.UINT8)]
    return number, fn.cat(number, number), *kinds, filled, other


def test_one_integer_per_sample_is_a_label_and_readers_are_read_together(files):
    loader = DALILoader(many, 3, num_threads=1, arguments={"files": files[:3], "count": 3})
    ((number, pair, real, byte, filled, other),) = loader
    assert other.tolist() == [7] * 3
    assert (number.shape, number.dtype) == (byte.shape, byte.dtype) == ((3,), torch.int64)
    assert (pair.shape, pair.dtype, real.shape, real.dtype) == ((3, 2), torch.int32, (3, 1), torch.float32)
    assert filled.all()  # the loader passed the device and the seed of the order
    loader.close()


@pipeline_def
def ragged(files):
    """Images of their own sizes, which make no batch, from a reader that does not know of shards."""
    encoded, labels = fn.readers.file(files=files, labels=list(range(len(files))), pad_last_batch=True, name="r")
    return fn.decoders.image(encoded), labels


@pipeline_def
def on_a_gpu(files, shard_id, num_shards):
    """An operator for the GPU, whatever the device of the loader."""
    shard = {"shard_id": shard_id, "num_shards": num_shards, "pad_last_batch": True}
    encoded, labels = fn.readers.file(files=files, labels=list(range(len(files))), **shard)
    return fn.decoders.image(encoded, device="mixed"), labels


@pipeline_def
def from_a_folder(files, shard_id, num_shards):
    """A folder that is not there."""
    shard = {"shard_id": shard_id, "num_shards": num_shards, "pad_last_batch": True}
    encoded, labels = fn.readers.file(file_root="missing-folder", **shard)
    return encoded, labels


def read_plainly(files):
    """A reader in dynamic mode that keeps no state."""
    return dynamic.readers.File(files=files, labels=list(range(len(files))), pad_last_batch=True)


@pipeline_def
def without_reader(files):
    return fn.random.uniform(range=[0, 1])


UNUSABLE = (ValueError, RuntimeError, TypeError)  # of DALI itself, some of them
TWO_RANKS = {"rank": 1, "world_size": 2}


@pytest.mark.parametrize(
    ("pipeline", "settings", "error", "message"),
    [
        (ragged, {}, UNUSABLE, "must be representable as a tensor - it must have uniform shape"),
        (without_reader, {}, UNUSABLE, "pipeline: expected a pipeline function with a reader, because without"),
        (many, {"arguments": {"count": 2}}, UNUSABLE, "reader '(first|second)' .*'epoch_size': (2|21)}, got .*(21|2)}"),
        (photos, {"arguments": {"pad": False}}, UNUSABLE, "the reader 'photos' .*got .*'pad_last_batch': (False|0)"),
        (photos, {"rank": 0, "world_size": 22}, UNUSABLE, "number of input samples: 21, needs"),
        (ragged, TWO_RANKS, UNUSABLE, "Expected the reader 'r' to have {'shard_id': 1, .*got {'shard_id': 0"),
        (photos, {"arguments": {"x": 1}}, UNUSABLE, r"expected arguments of the function, .*got \['x'\]"),
        (from_a_folder, {}, UNUSABLE, "missing-folder"),
        (DynamicPipeline(read_plainly), {}, UNUSABLE, "enable_checkpointing=True"),
        (DynamicPipeline(read_plainly), {"arguments": {"x": 1}}, UNUSABLE, r"arguments of the function, .*got \['x'\]"),
        (DynamicPipeline(read_plainly), TWO_RANKS, UNUSABLE, "Expected the reader .* to have {'shard_id': 1"),
        (DynamicPipeline(lambda files: 3), {}, TypeError, "what reader returned: expected a reader of nvidia.dali"),
        (DynamicPipeline(read_photos, lambda *read: 3), {}, TypeError, "what process returned: expected a batch"),
        (
            DynamicPipeline(read_photos, lambda *read: dynamic.decoders.image(read[0])),
            {"arguments": {"pad": False}},
            UNUSABLE,
            "'pad_last_batch': (False|0)",
        ),
        (print, {}, TypeError, "pipeline: expected an ImageFolder"),
        (Pipeline, {}, TypeError, "an uncalled function decorated with nvidia.dali.pipeline_def"),
        (ImageFolder, {"batch_size": 2.0}, ValueError, "batch_size: expected an integer of at least 1, got 2.0"),
        (ImageFolder, {"num_threads": 0}, ValueError, "num_threads: .* integer of at least 1, or None, got 0"),
        (ImageFolder, {"prefetch": None}, ValueError, "prefetch: expected"),
        (ImageFolder, {"seed": -1}, ValueError, "seed: expected an integer of at least 0, or None, got -1"),
        (ImageFolder, {"rank": 0}, ValueError, r"rank, world_size: expected both or neither, .* got \(0, None\)"),
        (ImageFolder, {"rank": 2, "world_size": 2}, ValueError, "rank below world_size"),
        (ImageFolder, {"drop_last": "fill"}, TypeError, "drop_last='fill'"),
        (ImageFolder, {"device": "meta"}, ValueError, "device: expected a device of type cpu"),
        (ImageFolder, {"arguments": {"x": 1}}, ValueError, "expected None, because an ImageFolder sets its own"),
        (ImageFolder, {"rank": 0, "world_size": 22}, ValueError, "at least one for each of 22 ranks, got 21"),
    ],
)
def test_what_cannot_be_used_is_refused(root, files, pipeline, settings, error, message):
    settings = {"batch_size": 4, "num_threads": 1, **settings}
    if pipeline is ImageFolder:
        pipeline = ImageFolder(root, train=True, index=True)
    else:
        settings["arguments"] = {"files": files, **settings.get("arguments", {})}
    with pytest.raises(error, match=message):
        next(iter(DALILoader(pipeline, **settings)))


def test_the_seed_is_lightnings_and_the_ranks_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert DALILoader(photos, 5).seed == 7
    monkeypatch.delenv("PL_GLOBAL_SEED")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    loader, own = DALILoader(photos, 4), DALILoader(photos, 4, num_threads=5)
    assert (loader.seed, loader.num_threads, own.num_threads) == (0, 8, 5)
    for here, threads in ((1, 8), (4, 3), (16, 1)):
        for each in (loader, own):
            each.place("cpu", 0, 16, here)
        assert (loader.num_threads, own.num_threads) == (threads, 5)
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "6")  # torchrun's, for loops without a Trainer
        assert DALILoader(photos, 4).num_threads == 2


def test_an_operator_for_a_gpu_on_a_machine_without_is_named(files):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    loader = DALILoader(on_a_gpu, 2, num_threads=1, arguments={"files": files})
    with pytest.raises(RuntimeError, match=r"GPU operator .*this loader is on the CPU\. Add a parameter"):
        next(iter(loader))


def test_a_broken_file_of_a_folder_is_named(tmp_path):
    make_photos(tmp_path, per_class=2, suffixes=(".jpg",))
    broken = next(tmp_path.rglob("*.jpg"))
    broken.write_bytes(b"an error page of a server")
    loader = DALILoader(ImageFolder(tmp_path, train=False, size=8), 6, num_threads=1)
    with pytest.raises(RuntimeError, match=rf"These files are not JPEG or PNG: .*{broken.name}. Remove or repair them"):
        list(loader)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["pipeline", "dynamic", "folder"])
def test_random_settings_count_as_plain_python_does(root, files, kind, seed):
    """Sizes, shards, last batches, early breaks and resumes of one loader a rank, beside sets of numbers."""
    draws = random.Random(seed)
    batch, world, drop = draws.randint(1, 8), draws.randint(1, 4), draws.random() < 0.4

    def make(rank):
        settings = {"num_threads": 1, "seed": seed, "drop_last": drop, "rank": rank, "world_size": world}
        if kind == "folder":
            return DALILoader(ImageFolder(root, train=True, size=8, index=True), batch, **settings)
        pipeline = photos if kind == "pipeline" else DynamicPipeline(read_photos, process_photos)
        return DALILoader(pipeline, batch, arguments={"files": files}, **settings)

    ranks = [make(rank) for rank in range(world)]
    expected = COUNT // world // batch if drop else math.ceil(math.ceil(COUNT / world) / batch)
    assert {len(loader) for loader in ranks} == {expected}
    for _ in range(3):
        cut, seen = draws.randint(0, expected), []
        for rank, loader in enumerate(ranks):
            batches = iter(loader)
            own = list(itertools.islice(batches, cut))
            if draws.random() < 0.5:  # a stop
                state = loader.state_dict()
                loader.close()
                ranks[rank] = loader = make(rank)
                loader.load_state_dict(state)
                batches = iter(loader) if 0 < cut < expected else iter(())
                own += list(batches) if 0 < cut < expected else list(loader) if cut == 0 else []
            else:
                own += list(batches)
            assert len(own) == expected
            seen += numbers(own) if own else []
        assert set(seen) == set(range(COUNT)) if not drop else len(set(seen)) == len(seen) == expected * batch * world
        assert len(seen) <= COUNT + world
    for loader in ranks:
        loader.close()


@pytest.mark.parametrize(("cause", "device", "said"), [
    (None, None, "failed\nLook here"), ("no space", None, "failed: no space\nLook here"),
    ("CUDA driver", 0, "failed: CUDA driver\nLook here"),
    ("CUDA driver", None, "failed: CUDA driver\nThe pipeline uses a GPU operator"),
])  # fmt: skip
def test_an_error_of_dali_s_is_told_with_its_cause_and_what_to_do(cause, device, said):
    error = RuntimeError("failed")
    error.__cause__ = None if cause is None else ValueError(cause)
    assert str(explained(error, Placement(0, 1, device), "Look here")).startswith(said)


def test_the_state_of_one_rank_holds_the_pipelines_of_all(root, monkeypatch):
    monkeypatch.setattr(dali_loader, "data_rank_and_size", lambda: (1, 2))
    monkeypatch.setattr(dali_loader, "gather_for_checkpoint", lambda own, name, to_all: [(0, "of rank 0"), own])
    loader = DALILoader(ImageFolder(root, train=False, size=8), 4, num_threads=1)
    try:
        next(iter(loader))
        pipelines = loader.state_dict()["pipelines"]
        assert pipelines[0] == "of rank 0"
        assert pipelines[1] not in (None, "of rank 0")
        monkeypatch.setattr(dali_loader, "gather_for_checkpoint", lambda own, name, to_all: [own])  # after an error
        assert list(loader.state_dict()["pipelines"]) == [1]
    finally:
        loader.close()


@pytest.mark.parametrize(("device", "number"), [("cuda", 3), ("cuda:1", 1), ("cpu", None)])
def test_a_device_without_a_number_is_the_current_one(root, device, number, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    loader = DALILoader(ImageFolder(root, train=False, size=8), 4)
    loader.device = torch.device(device)
    assert loader._placement() == Placement(0, 1, number)
