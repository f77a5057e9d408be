"""DALILoader over pipelines that the user wrote: readers and sources of DALI, its checkpoints, its errors."""

import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from nvidia.dali import Pipeline, fn, pipeline_def, types

from lightning_turbo import DALILoader
from tests.dali_samples import make_photos

COUNT = 21


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = make_photos(tmp_path_factory.mktemp("photos"), per_class=7, suffixes=(".jpg",))
    return sorted(str(path) for path in root.rglob("*.jpg"))


@pipeline_def
def photos(files, shard_id, num_shards, shuffle=True, pad=True, stick=False):
    """Random crops, and the number of each photograph as its label."""
    encoded, labels = fn.readers.file(
        files=files, labels=list(range(len(files))), shard_id=shard_id, num_shards=num_shards, random_shuffle=shuffle,
        initial_fill=16, pad_last_batch=pad, stick_to_shard=stick, name="photos",
    )  # fmt: skip
    image = fn.decoders.image_random_crop(encoded, output_type=types.RGB)
    return fn.resize(image, size=(8, 8)), labels


def make(files, batch_size=4, arguments=(), **kwargs):
    everything = {"files": files, **dict(arguments)}
    return DALILoader(photos, batch_size, arguments=everything, **{"num_threads": 1, "seed": 5, **kwargs})


def same(first, second):
    return len(first) == len(second) and all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


def labels(batches):
    return torch.cat([batch[1] for batch in batches]).tolist()


@pytest.mark.parametrize(("last_batch", "sizes"), [("partial", [4] * 5 + [1]), ("fill", [4] * 6), ("drop", [4] * 5)])
def test_length_and_coverage(files, last_batch, sizes):
    loader = make(files, last_batch=last_batch)
    orders = []
    for _ in range(3):
        batches = list(loader)
        assert [len(label) for _, label in batches] == sizes
        assert len(loader) == len(sizes)
        assert all(label.dtype == torch.int64 for _, label in batches)
        orders.append(labels(batches))
        assert len(set(orders[-1])) == min(COUNT, sum(sizes))
    assert orders[0] != orders[1] != orders[2]
    loader.close()


@pytest.mark.parametrize("batch_size", [1, 4, 5])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("stick", [False, True])
def test_shards_cover_everything_and_steps_agree(files, batch_size, world, stick):
    ranks = [make(files, batch_size, {"stick": stick}, rank=r, world_size=world) for r in range(world)]
    for _ in range(2):
        epochs = [list(loader) for loader in ranks]
        assert {len(epoch) for epoch in epochs} == {len(ranks[0])}
        seen = list(itertools.chain.from_iterable(labels(epoch) for epoch in epochs))
        assert set(seen) == set(range(COUNT))
        assert len(seen) <= COUNT + world - 1  # a rank whose last batch would be empty repeats one
        assert all(len(label) >= 1 for epoch in epochs for _, label in epoch)
    for loader in ranks:
        loader.close()


def test_a_part_of_an_epoch_is_left_behind(files):
    loader = make(files)
    for taken in (1, 2, 5):
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        assert sorted(labels(loader)) == list(range(COUNT))
    loader.close()


def test_epochs_cut_short_differ(files):
    loader = make(files)
    firsts = []
    for _ in range(3):
        firsts.append(next(iter(loader))[1].tolist())
    assert firsts[0] != firsts[1] != firsts[2]
    loader.close()


@pytest.mark.parametrize("last_batch", ["partial", "drop"])
@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_resumed_it_yields_what_was_not_seen_bit_for_bit(files, last_batch, epoch, at):
    loader = make(files, last_batch=last_batch)
    for _ in range(epoch):
        list(loader)
    batches = iter(loader)
    for _ in range(at):
        next(batches)
    state = loader.state_dict()
    rest = list(batches) if at < len(loader) else []
    following = list(loader)
    loader.close()

    other = make(files, last_batch=last_batch, seed=1)
    other.load_state_dict(state)
    if rest:
        assert same(list(other), rest)
    assert same(list(other), following)
    other.close()


def test_resumed_after_a_part_it_goes_on_like_the_run_that_saved(files):
    """``limit_train_batches`` cut an epoch short, then the checkpoint was written: the next epoch is the same."""
    loader = make(files)
    for batch, _ in enumerate(loader):
        if batch == 1:
            break
    state = loader.state_dict()
    loader.set_epoch(1)
    expected = list(loader)
    loader.close()
    other = make(files)
    other.load_state_dict(state)
    other.set_epoch(1)
    assert same(list(other), expected)
    other.close()


@pipeline_def
def counted():
    """A source without a reader: DALI's external source, three batches an epoch."""

    def source(info):
        if info.iteration >= 3:
            raise StopIteration
        return [np.array([info.iteration * 2 + n, info.epoch_idx], dtype=np.float32) for n in range(2)]

    return fn.external_source(source=source, batch=True, batch_info=True)


def test_a_source_with_an_announced_length():
    loader = DALILoader(counted, 2, batches=3, num_threads=1)
    for epoch in range(3):
        batches = list(loader)
        assert [batch[:, 0].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
        assert {float(v) for batch in batches for v in batch[:, 1]} == {epoch}
    next(iter(loader))
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    loader.close()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_source_resumes(at):
    loader = DALILoader(counted, 2, batches=3, num_threads=1)
    list(loader)
    batches = iter(loader)
    for _ in range(at):
        next(batches)
    state = loader.state_dict()
    rest = list(batches) or list(loader)
    loader.close()
    other = DALILoader(counted, 2, batches=3, num_threads=1)
    other.load_state_dict(state)
    got = list(other)
    assert len(got) == len(rest)
    assert all(torch.equal(a, b) for a, b in zip(got, rest, strict=True))
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
        first = [batch[0, 0].item() for batch in loader]
        if cycle is None:
            with pytest.raises(ValueError, match=r"ended after 0 batches of 3.* begin again: .*cycle='raise'"):
                list(loader)
        else:
            assert [batch[0, 0].item() for batch in loader] == first
        loader.close()
    assert first == [0, 1, 2]


@pipeline_def
def many(shard_id=0, num_shards=1, device="none"):
    """Outputs of every kind, to see which are taken for labels."""
    data = fn.external_source(source=lambda: [np.float32([1, 2])] * 3, batch=True)
    one_int = fn.external_source(source=lambda: np.full((3, 1), 7, dtype=np.int32), batch=True)
    scalar = fn.external_source(source=lambda: np.full((3,), 7, dtype=np.uint8), batch=True)
    one_float = fn.external_source(source=lambda: np.full((3, 1), 0.5, dtype=np.float32), batch=True)
    two_ints = fn.external_source(source=lambda: np.full((3, 2), 7, dtype=np.int32), batch=True)
    where = fn.external_source(source=lambda: np.full((3,), device == "cpu"), batch=True)
    return data, one_int, scalar, one_float, two_ints, where


def test_one_integer_a_sample_is_a_label():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Checkpointing enabled in a pipeline with external source")
        loader = DALILoader(many, 3, batches=1, num_threads=1)
        ((data, one_int, scalar, one_float, two_ints, where),) = loader
    assert data.shape == (3, 2)
    assert (one_int.shape, one_int.dtype) == ((3,), torch.int64)
    assert (scalar.shape, scalar.dtype) == ((3,), torch.int64)
    assert (one_float.shape, one_float.dtype) == ((3, 1), torch.float32)
    assert (two_ints.shape, two_ints.dtype) == ((3, 2), torch.int32)
    assert where.tolist() == [True] * 3  # the loader filled in the device
    loader.close()


@pipeline_def
def nothing():
    """No outputs."""


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


@pipeline_def
def unsharded(files):
    _, labels = fn.readers.file(files=files, labels=list(range(len(files))), pad_last_batch=True, name="alone")
    return labels


def refused(definition, message, error=ValueError, **kwargs):
    loader = DALILoader(definition, **{"batch_size": 4, "num_threads": 1, **kwargs})
    with pytest.raises(error, match=message):
        next(iter(loader))
    loader.close()


def test_pipelines_that_cannot_be_used_are_refused(files):
    given = {"files": files}
    refused(nothing, "The pipeline has no outputs")
    refused(ragged, "Output 0 of the pipeline has samples of different shapes", arguments=given)
    refused(counted, "The pipeline has no reader that counts its samples|give batches=", batch_size=2)
    refused(photos, "batches=3, but the reader counts them", arguments=given, batches=3)
    refused(two_readers, r"has the readers \['first', 'second'\]", arguments=given)
    refused(two_readers, r"reader='third': the pipeline has the readers", arguments=given, reader="third")
    refused(photos, "pad_last_batch=False, and 21 samples are no multiple", arguments={**given, "pad": False})
    refused(photos, "last_batch='drop' leaves no batch: 21 samples", arguments=given, batch_size=22, last_batch="drop")
    refused(photos, "number of input samples: 21, needs", RuntimeError, arguments=given, rank=0, world_size=22)
    refused(
        unsharded,
        "'alone' has num_shards=1 and shard_id=0, but this is rank 1 of 2",
        arguments=given,
        rank=1,
        world_size=2,
    )
    refused(photos, "are 3 names, but the pipeline has 2 outputs", arguments=given, outputs=("a", "b", "c"))
    with pytest.raises(TypeError, match=r"the pipeline function takes no \['nonsense'\], but \['files', 'shard_id'"):
        DALILoader(photos, 4, arguments={**given, "nonsense": 1})


def test_the_reader_that_counts_can_be_chosen(files):
    loader = DALILoader(two_readers, 4, num_threads=1, arguments={"files": files}, reader="second")
    assert len(loader) == 2
    loader.close()


def test_unpadded_readers_are_fine_where_nothing_is_left_over(files):
    loader = make(files, 7, {"pad": False})
    for _ in range(2):
        assert sorted(labels(loader)) == list(range(COUNT))
    loader.close()


def test_an_error_of_the_pipeline_leaves_the_loader_usable(files, tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    loader = make([*files[:4], str(bad), *files[5:]], arguments={"shuffle": False})
    batches = iter(loader)
    next(batches)
    with pytest.raises(RuntimeError, match=r"nvImageCodec failure|decode"):
        next(batches)
    bad.write_bytes(Path(files[4]).read_bytes())
    assert sorted(labels(loader)) == list(range(COUNT))
    loader.close()


def test_a_state_without_a_checkpoint_is_refused_in_mid_epoch(files):
    loader = make(files)
    next(iter(loader))
    loader.close()
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="batch=1 of epoch 0 has no checkpoint of the pipeline"):
        next(iter(loader))
    loader.close()


def test_what_becomes_of_a_class_of_pipeline_is_said():
    class Hybrid(Pipeline):
        pass

    for wrong in (Hybrid, Hybrid(4, 1, None)):
        with pytest.raises(TypeError, match="its define_graph becomes that function"):
            DALILoader(wrong, 4)
