"""PrefetchNextEpoch under a real Trainer: the same training with no wait at an epoch's start, and nothing left."""

import itertools
import warnings

import pytest
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_turbo import PrefetchDataModule, PrefetchLoader, PrefetchNextEpoch
from lightning_turbo.errors import NoEffectWarning, TurboWarning
from tests.integration.noting import EACH_STRATEGY, Noting, Numbers, Save, fit, gives
from tests.leftovers import nothing_is_left, wait_until
from tests.trainers import quiet_trainer

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*validation_step. but have no .val_dataloader"),
]
WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


class Streamed(IterableDataset):
    def __iter__(self):
        return (Numbers()[index] for index in range(24))


class Data(PrefetchDataModule):
    def __init__(self, dataset=None, validate=False, **settings):
        super().__init__()
        self.dataset, self.settings = dataset or Numbers(), {"batch_size": 4, "shuffle": True, **settings}
        if validate:
            self.val_dataloader = lambda: DataLoader(Numbers(8), batch_size=4)

    def train_dataloader(self):
        return DataLoader(self.dataset, **self.settings)


def with_loader():
    """Without ``PrefetchDataModule``, which would add ``ExactResume``."""
    return gives(PrefetchLoader(Numbers(), batch_size=4, shuffle=True), LightningDataModule)


def two():
    return gives([DataLoader(Numbers(), batch_size=4, shuffle=True), DataLoader(Numbers(12), batch_size=4)])


def steady():
    """Draws no random numbers."""
    return Noting(dropout=0.0)


def early(data, *callbacks, **settings):
    return fit(data, PrefetchNextEpoch(), *callbacks, **{"max_epochs": 3, **settings})


def assert_whole_epochs(seen):
    """Every sample comes once in each three epochs, in another order."""
    orders = [list(itertools.chain(*seen[at : at + 6])) for at in (0, 6, 12)]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert len(set(map(tuple, orders))) == 3


@pytest.mark.parametrize(("workers", "strategy"), [(WORKERS[0], "turbo"), (WORKERS[1], "auto"), (WORKERS[2], "turbo")])
def test_training_is_the_same_where_nothing_draws_in_between(workers, strategy):
    plain = fit(Data(**workers), model=steady, max_epochs=3, strategy=strategy)
    ours = early(Data(**workers), model=steady, strategy=strategy)
    assert (ours.seen, ours.losses) == (plain.seen, plain.losses)
    assert_whole_epochs(ours.seen)


class Reads(Noting):
    def training_step(self, batch, batch_idx):
        assert batch[1][1].tolist() == [4 * (batch_idx % 3) + k for k in range(4)]
        return super().training_step(batch[0], batch_idx)


@pytest.mark.parametrize(
    ("make", "model"),
    [
        (lambda: Data(validate=True), Noting),
        (lambda: Data(validate=True, **WORKERS[2]), Noting),
        (two, Reads),
    ],
    ids=["in threads", "in workers", "several loaders"],
)
def test_a_seed_gives_one_result_whatever_draws_in_between(make, model):
    first, second = (early(make(), model=model) for _ in range(2))
    assert (first.seen, first.losses) == (second.seen, second.losses)
    assert_whole_epochs(first.seen)


@EACH_STRATEGY
def test_loading_goes_on_before_validation(strategy):
    asked = []

    class Look(Callback):
        def on_validation_start(self, trainer, pl_module):
            if not trainer.sanity_checking and trainer.current_epoch < 2:
                wait_until(lambda: len(data.dataset.asked) > 24 * (trainer.current_epoch + 1))
            asked.append(len(data.dataset.asked))

    data = Data(validate=True)
    early(data, Look(), strategy=strategy)
    assert asked[0] == 0
    assert 24 < asked[1] <= 48 < asked[2] <= 72
    assert asked[3] == 72  # after the last epoch none is begun
    assert len(data.dataset.asked) == 72


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": -1, "max_steps": 12},
        {"limit_train_batches": 3},
        {"reload_dataloaders_every_n_epochs": 1},
        {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5},
        {"accumulate_grad_batches": 4},
        {"val_check_interval": 2},
        {"overfit_batches": 2},
        {"strategy": "turbo", "limit_train_batches": 3},
    ],
)
@pytest.mark.filterwarnings("ignore:.*You requested to overfit")
def test_flags_of_the_trainer(settings):
    settings = {"max_epochs": 3, "model": steady, **settings}
    plain = fit(Data(shuffle=False, validate=True), **settings)
    ours = early(Data(shuffle=False, validate=True), **settings)
    assert (ours.seen, ours.losses) == (plain.seen, plain.losses)


def does(hook, act):
    """A callback that does something in a hook of the second epoch."""

    def acts(self, trainer, *_):
        if trainer.current_epoch == 1:
            self.trainer = trainer  # as a program does that looks at it afterwards
            act(trainer)

    return type("Does", (Callback,), {hook: acts})()


def fails(error):
    def fail(trainer):
        raise error("here")

    return fail


@pytest.mark.parametrize("workers", WORKERS[::2])
def test_stopping_early_leaves_nothing(workers):
    early(Data(**workers), does("on_train_batch_end", lambda trainer: setattr(trainer, "should_stop", True)))
    stopper = EarlyStopping("val", patience=1, min_delta=100.0)
    early(Data(validate=True, **workers), stopper, max_epochs=50)
    assert stopper.stopped_epoch == 1


@pytest.mark.parametrize(
    ("hook", "error", "workers"),
    [
        ("on_train_epoch_end", ValueError, WORKERS[0]),
        ("on_train_epoch_end", KeyboardInterrupt, WORKERS[2]),
        ("on_train_epoch_start", ValueError, {"num_workers": 1}),
        ("on_train_epoch_start", KeyboardInterrupt, {"num_workers": 1}),
    ],
)
def test_an_exception_between_epochs_leaves_nothing(hook, error, workers):
    fail = does(hook, fails(error))
    with pytest.raises((error, SystemExit)):
        early(Data(Numbers(96), **workers), fail)
    assert fail.trainer.current_epoch == 1
    nothing_is_left()


def dealt():
    return {"shuffle": False, "sampler": DistributedSampler(range(24), 2, 1)}


@pytest.mark.parametrize(
    ("settings", "hook", "strategy"),
    [
        (lambda: WORKERS[0], "on_train_epoch_end", "auto"),
        (lambda: WORKERS[0], "on_train_batch_end", "turbo"),
        (lambda: WORKERS[1], "on_train_batch_end", "auto"),
        (lambda: WORKERS[2], "on_train_epoch_end", "turbo"),
        (dealt, "on_train_epoch_end", "auto"),
        (None, "on_train_batch_end", "auto"),
        (None, "on_train_epoch_end", "auto"),
    ],
)
def test_going_on_after_an_epoch_equals_never_having_stopped(settings, hook, strategy, tmp_path):
    path, epoch = tmp_path / "one.ckpt", 3 if settings is dealt else 6
    # Lightning itself does not validate when it goes on from an epoch's last step.
    validate = hook == "on_train_epoch_end" and settings is not dealt

    def run(**more):
        data = with_loader() if settings is None else Data(validate=validate, **settings())
        return early(data, Save(path, 2 * epoch, hook), max_epochs=4, strategy=strategy, **more)

    whole = run()
    rest = run(seed=5, ckpt_path=path)
    assert rest.seen == whole.seen[2 * epoch :]
    assert rest.losses == whole.losses[2 * epoch :]
    if settings is dealt:
        assert whole.seen == fit(Data(**dealt()), max_epochs=4).seen


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda: {"train_dataloaders": DataLoader(Numbers(), batch_size=4)}, id="plain"),
        pytest.param(lambda: {"datamodule": Data(Streamed(), shuffle=None)}, id="stream"),
    ],
)
def test_where_nothing_can_begin_early_it_is_said_once(data):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        quiet_trainer(callbacks=[PrefetchNextEpoch()], max_epochs=4).fit(Noting(), **data())
    texts = [str(each.message) for each in told if issubclass(each.category, NoEffectWarning)]
    assert len([text for text in texts if "no training loader can begin an epoch early" in text]) == 1


def test_a_checkpoint_of_other_loaders_says_that_orders_are_drawn_anew(tmp_path):
    early(Data(), Save(tmp_path / "one.ckpt", 6, "on_train_epoch_end"))
    with pytest.warns(TurboWarning, match="for 1 training loaders, and this run has 2"):
        early(two(), model=Reads, ckpt_path=tmp_path / "one.ckpt")
