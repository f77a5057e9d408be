"""Loaders over datasets with indices, beside torch's DataLoader, stock Lightning and runs that never stopped."""

import copy
import multiprocessing
import random
import threading

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from lightning_turbo import PrefetchLoader
from tests.data.samples import saved, seeded, take, values
from tests.leftovers import nothing_is_left, prefetch_threads
from tests.promises.runs import (
    LENGTH,
    Net,
    Slow,
    another_process,
    flat,
    generators,
    is_told,
    listed,
    resuming,
    seed,
    stock,
    stopped,
    turbo,
)

pytestmark = [pytest.mark.usefixtures("all_ends", "every_loader_has_a_thread"), pytest.mark.timeout(60)]
WORKERS = pytest.mark.parametrize("workers", [0, 1])


def beside_plain(run, *arguments):
    """Check that a function of a loader class returns for PrefetchLoader what it returns for DataLoader."""
    results = []
    for kind in (DataLoader, PrefetchLoader):
        seed(0)
        results.append((run(kind, *arguments), generators()))
    assert results[0] == results[1]


def shuffled(kind, workers=0, size=4, **settings):
    return kind(Slow(), batch_size=size, shuffle=True, num_workers=workers, **settings)


# ---- Iterators.


def test_a_thread_loads_while_the_step_runs():
    threads = []
    data = Slow(lambda index: threads.append(threading.get_ident()) or index, seconds=0.002)
    assert values(PrefetchLoader(data, batch_size=4)) == values(DataLoader(range(LENGTH), batch_size=4))
    assert {threading.get_ident()} < set(threads)


@pytest.mark.parametrize(("workers", "sampler"), [(0, None), (0, "replacement"), (2, None)])
@pytest.mark.parametrize("batches", [None, 3], ids=["whole", "break"])
def test_batches_and_generators_after_two_epochs(workers, batches, sampler):
    def run(kind):
        order = {"sampler": RandomSampler(range(LENGTH), replacement=True)} if sampler else {"shuffle": True}
        loader = kind(Slow(), batch_size=4, num_workers=workers, **order)
        return [take(iter(loader), batches) for _ in range(2)]

    beside_plain(run)


@WORKERS
def test_a_zip_of_two_shuffled_loaders(workers):
    def run(kind):
        return [listed(pair) for pair in zip(shuffled(kind, workers), shuffled(kind, workers), strict=True)]

    beside_plain(run)


@WORKERS
def test_draws_between_iter_and_the_first_batch(workers):
    def run(kind):
        iterator = iter(shuffled(kind, workers))
        torch.rand(1)
        return values(iterator)

    beside_plain(run)


class Draws(Net):
    def on_train_start(self):
        torch.rand(1)


@WORKERS
@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_run_whose_hook_draws_before_the_first_batch(workers, names):
    """Of one loader, and of two in a dict, for which Lightning calls ``iter`` early."""

    def make():
        return {name: shuffled(DataLoader, workers) for name in names}

    assert turbo(make(), model=Draws) == stock(make(), model=Draws)


def test_persistent_workers_over_three_epochs():
    def run(kind):
        loader = shuffled(kind, 2, persistent_workers=True)
        epochs = [values(loader) for _ in range(3)]
        assert len(multiprocessing.active_children()) == 2
        return epochs

    beside_plain(run)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_an_epoch_after_a_break_and_one_after_an_iter_without_a_batch(workers, persistent):
    """The loader is asked for the next iterator while the last one is still held."""

    def run(kind):
        loader = shuffled(kind, workers, persistent_workers=persistent)
        seen, held = [], []
        for batches in (3, 0, 2, None):
            held.append(iter(loader))
            seen.append(take(held[-1], batches))
        return seen

    beside_plain(run)


class Fails(Slow):
    def __getitem__(self, index):
        if index == 13:
            raise ValueError("13")
        return super().__getitem__(index)


@WORKERS
@pytest.mark.parametrize("end", ["dropped", "closed", "error"])
def test_no_thread_or_process_is_left(workers, end):
    loader = PrefetchLoader(Fails() if end == "error" else Slow(), batch_size=1, num_workers=workers)
    iterator = iter(loader)
    take(iterator, 10)
    assert workers or end == "error" or prefetch_threads()
    if end == "error":
        with pytest.raises(ValueError, match="13"):
            take(iterator, 10)
    if end == "closed":
        loader.close()
    else:
        del iterator, loader
    nothing_is_left()


class Outer(Dataset):
    """Makes each sample of a loader of its own."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.cat([index + batch for batch in self.kind(Slow(), batch_size=4)])


@WORKERS
def test_a_loader_inside_of_a_dataset(workers):
    results = []

    def run():
        results.extend(
            values(kind(Outer(kind), batch_size=1, num_workers=workers)) for kind in (DataLoader, PrefetchLoader)
        )

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "hangs"
    assert results[0] == results[1]


# ---- Stops.


@pytest.mark.parametrize(("workers", "own"), [(0, False), (0, True), (1, True)])
@pytest.mark.parametrize(("whole", "batches"), [(0, 0), (0, 3), (0, 8), (1, 0), (1, 3)])
def test_a_state_goes_on_there_and_with_the_epochs_after_it(whole, batches, workers, own):
    """At zero, in the middle, after the last batch, at the end of an epoch, and in the next one."""

    def make(kind=PrefetchLoader, workers=workers):
        return shuffled(kind, workers, generator=seeded(3) if own else None)

    seed(0)
    straight = make(DataLoader, 0)
    epochs = [values(straight) for _ in range(3)]
    seed(0)
    loader = make()
    seen = [values(loader) for _ in range(whole)] + [take(iter(loader), batches)] * (batches > 0)
    again = another_process(make, loader)
    if batches:
        epochs[whole : whole + 1] = filter(None, [epochs[whole][:batches], epochs[whole][batches:]])
    assert seen + [values(again) for _ in epochs[len(seen) :]] == epochs


@WORKERS
@pytest.mark.parametrize("begun", [False, True], ids=["without iter", "with iter"])
def test_a_state_before_the_first_batch_fixes_the_order(begun, workers):
    """In the same loader, and in one of another process, whose generators stand elsewhere."""
    loader, again = (shuffled(PrefetchLoader, workers) for _ in range(2))
    rest = iter(loader) if begun else loader
    state = copy.deepcopy(loader.state_dict())
    expected = values(rest)
    for each in (loader, again):
        seed(5)
        each.load_state_dict(state)
        assert values(each) == expected


@WORKERS
def test_three_stops_in_one_epoch(workers):
    seed(0)
    loader = shuffled(DataLoader)
    straight = values(loader), values(loader)
    seed(0)
    loader, seen = shuffled(PrefetchLoader, workers), []
    for batches in (2, 3, 1):
        seen += take(iter(loader), batches)
        loader = another_process(lambda: shuffled(PrefetchLoader, workers), loader)
    assert (seen + values(loader), values(loader)) == straight


@WORKERS
def test_three_stops_of_a_run_in_one_epoch(workers, tmp_path):
    def make():
        return shuffled(DataLoader, workers)

    straight = stock(make())
    assert turbo(make()) == straight
    assert stopped(turbo, make, (2, 5, 6), tmp_path) == straight


def test_three_stops_of_a_run_with_persistent_workers(tmp_path):
    def make():
        return shuffled(DataLoader, 2, persistent_workers=True)

    assert stopped(turbo, make, (3, 8, 11), tmp_path) == stock(make())


# ---- A look at a batch, and one loader in two places.


@WORKERS
def test_a_look_at_a_batch_leaves_the_running_iterator_alone(workers):
    def run(kind):
        loader = shuffled(kind, workers)
        iterator = iter(loader)
        return take(iterator, 3), take(iter(loader), 1), values(iterator)

    beside_plain(run)


@WORKERS
def test_a_state_after_a_look_at_a_batch_is_that_of_the_running_iterator(workers):
    def make():
        return shuffled(PrefetchLoader, workers)

    seed(0)
    straight = values(shuffled(DataLoader))
    seed(0)
    loader = make()
    iterator = iter(loader)
    seen = take(iterator, 3)
    take(iter(loader), 1)
    assert seen + values(another_process(make, loader)) == straight


class Looks(Callback):
    """Shows a batch in the middle of an epoch, as callbacks that log images do."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            next(iter(trainer.train_dataloader))


@WORKERS
def test_a_run_whose_callback_looks_at_a_batch_and_saves(workers, tmp_path):
    def make():
        return shuffled(DataLoader, workers)

    straight = stock(make(), Looks())
    assert turbo(make(), Looks()) == straight
    assert stopped(turbo, make, (3, 5), tmp_path, Looks()) == straight


class Validates(Net):
    """Records batches alone, of training and of validation."""

    def training_step(self, batch, batch_idx):
        self.seen.append(("training", listed(batch)))
        return self.weight.square()

    def validation_step(self, batch, batch_idx):
        self.seen.append(("validation", listed(batch)))

    def on_train_end(self):
        """Record nothing."""


class SaveInValidation(Callback):
    def __init__(self, path):
        self.path = path

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2 and not self.path.exists():
            trainer.save_checkpoint(self.path)


SHUFFLED = pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")


def in_two_places(run, kind, *callbacks, **settings):
    loader = shuffled(kind)
    return run(loader, *callbacks, validation=loader, val_check_interval=4, model=Validates, **settings)


EACH_WAY = pytest.mark.parametrize(("run", "kind"), [
    (turbo, DataLoader),
    (resuming, PrefetchLoader),
], ids=["Prefetch", "PrefetchLoader"])  # fmt: skip


@SHUFFLED
@EACH_WAY
def test_one_loader_for_training_and_validation(run, kind):
    assert in_two_places(run, kind) == in_two_places(stock, DataLoader)


@SHUFFLED
@EACH_WAY
def test_one_loader_for_training_and_validation_saved_within_validation(run, kind, tmp_path):
    """The rest of the epoch comes once, in its order, and the validation as a whole."""
    path = tmp_path / "c"
    whole = in_two_places(run, kind, SaveInValidation(path), max_epochs=1)
    again = in_two_places(run, kind, path=path, max_epochs=1)
    assert [stage for stage, _ in again] == ["validation"] * 8 + ["training"] * 4 + ["validation"] * 8
    assert again[8:12] == whole[12:16]
    for validation in (again[:8], again[12:]):
        assert sorted(flat(batch for _, batch in validation)) == list(range(LENGTH))


# ---- Other batches, workers and ranks.


@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 0)])
def test_a_state_goes_on_with_other_workers(before, now):
    seed(0)
    loader = shuffled(DataLoader)
    straight = values(loader), values(loader)
    seed(0)
    loader = shuffled(PrefetchLoader, before)
    seen = take(iter(loader), 3)
    again = another_process(lambda: shuffled(PrefetchLoader, now), loader)
    assert (seen + values(again), values(again)) == straight


@pytest.mark.parametrize(("before", "now"), [(4, 6), (6, 4)])
def test_a_state_goes_on_with_another_batch_size(before, now):
    seed(0)
    order = flat(values(shuffled(DataLoader)))
    seed(0)
    loader = shuffled(PrefetchLoader, size=before)
    seen = take(iter(loader), 2)
    again = another_process(lambda: shuffled(PrefetchLoader, size=now), loader)
    rest = values(again)
    assert {len(batch) for batch in rest[:-1]} == {now}
    assert flat(seen + rest) == order
    assert sorted(flat(values(again))) == list(range(LENGTH))


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
def test_a_state_goes_on_with_other_ranks(before, now):
    """Each sample comes once, in the order of the epoch over all ranks."""

    def make(ranks):
        samplers = [DistributedSampler(range(LENGTH), ranks, rank) for rank in range(ranks)]
        return [PrefetchLoader(Slow(), batch_size=4, sampler=sampler) for sampler in samplers]

    def together(parts):
        return flat(zip(*map(flat, parts), strict=True))

    loaders = make(before)
    seen = together(take(iter(loader), 2) for loader in loaders)
    again = [another_process(lambda rank=rank: make(now)[rank], loaders[0]) for rank in range(now)]
    assert seen + together(values(loader) for loader in again) == list(DistributedSampler(range(LENGTH), 1, 0))


# ---- Samplers that keep something from pass to pass.


class InPlace(Sampler):
    """Shuffles its own list, so that each order follows from the one before."""

    def __init__(self):
        self.order, self.draws = list(range(LENGTH)), random.Random(0)

    def __len__(self):
        return LENGTH

    def __iter__(self):
        self.draws.shuffle(self.order)
        return iter(list(self.order))


class EpochInPlace(InPlace):
    """Shuffles its own list with a generator that follows from the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.draws = random.Random(epoch)


class Passes(InPlace):
    """Counts its passes, from which its order follows."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(LENGTH), LENGTH))


class Decays(InPlace):
    """Draws with replacement. What was drawn becomes less likely."""

    def __init__(self):
        self.weights, self.draws = torch.ones(LENGTH), seeded(0)

    def __iter__(self):
        drawn = torch.multinomial(self.weights, LENGTH, True, generator=self.draws)
        self.weights[drawn] *= 0.5
        return iter(drawn.tolist())


class ByState(InPlace):
    """Has a state of its own."""

    def state_dict(self):
        return {"order": list(self.order), "draws": self.draws.getstate()}

    def load_state_dict(self, state):
        self.order = list(state["order"])
        self.draws.setstate(state["draws"])


def torchdatas():
    return StatefulDistributedSampler(range(LENGTH), 1, 0)


def stopped_in_epoch(epochs, make_sampler):
    """Return the batches after a stop in an epoch, those of a run without it, and what was told after the stop."""

    def begin(loader, epoch):
        getattr(loader.sampler, "set_epoch", int)(epoch)
        return iter(loader)

    def make():
        return PrefetchLoader(Slow(), batch_size=4, sampler=make_sampler())

    loader = make()
    for epoch in range(epochs):
        values(begin(loader, epoch))
    iterator = begin(loader, epochs)
    take(iterator, 3)
    state = saved(loader.state_dict())
    straight = values(iterator), values(begin(loader, epochs + 1))

    def go_on():
        again = make()
        again.load_state_dict(state)
        return values(begin(again, epochs)), values(begin(again, epochs + 1))

    return *is_told(go_on), straight


@pytest.mark.parametrize("kind", [InPlace, EpochInPlace, Passes, Decays])
def test_a_sampler_that_changes_goes_on_in_its_first_epoch(kind):
    (rest, _), told, (straight, _) = stopped_in_epoch(0, kind)
    assert rest == straight
    assert not told


@pytest.mark.parametrize("kind", [InPlace, EpochInPlace, Passes, Decays])
def test_a_sampler_that_changes_is_named_after_a_resume_in_a_later_epoch(kind):
    _, told, _ = stopped_in_epoch(1, kind)
    assert [kind.__name__ in text for text in told] == [True]


@pytest.mark.parametrize("make_sampler", [ByState, torchdatas])
def test_a_sampler_with_a_state_or_epoch_goes_on_in_a_later_epoch(make_sampler):
    resumed, told, straight = stopped_in_epoch(1, make_sampler)
    assert resumed == straight
    assert not told


class Consumed:
    """A batch sampler that a script starts after the samples that were used."""

    def __init__(self, samples=0):
        self.samples = samples

    def __len__(self):
        return LENGTH // 4

    def __iter__(self):
        return (list(range(begin, begin + 4)) for begin in range(self.samples, LENGTH, 4))


def test_a_sampler_that_a_script_has_put_forward_already_is_named():
    loader = PrefetchLoader(Slow(), batch_sampler=Consumed())
    take(iter(loader), 3)
    again = PrefetchLoader(Slow(), batch_sampler=Consumed(12))
    again.load_state_dict(loader.state_dict())
    _, told = is_told(lambda: values(again))
    assert ["Consumed" in text for text in told] == [True]
