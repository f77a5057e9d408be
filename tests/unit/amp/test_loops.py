"""The plain loops of the literature: only the import is changed."""

import contextlib
import copy
import gc
import threading
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_turbo import amp
from lightning_turbo.amp import registration
from lightning_turbo.errors import AmpStateError, AmpUsageError

LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()
    registration._registered.clear()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def init(models, optimizers=None, level="O1", **kwargs):
    return amp.initialize(models, optimizers, opt_level=level, **{"dtype": torch.float16, "verbosity": 0, **kwargs})


def train(model, optimizer, steps=3, seed=5, scheduler=None, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4, generator=generator)).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer, **kwargs) as scaled:
            scaled.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return float(loss.detach())


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Several initializations


@pytest.mark.parametrize("first", LEVELS)
@pytest.mark.parametrize("second", LEVELS)
def test_initialize_may_be_called_again(first, second):
    model = net()
    init(model, sgd(model), first)
    again = net()
    optimizer = sgd(again)
    init(again, optimizer, second)
    folds = train(again, optimizer)
    amp.shutdown()
    alone = net()
    optimizer = sgd(alone)
    init(alone, optimizer, second)
    assert folds == train(alone, optimizer)
    assert same(weights(again), weights(alone))


def test_an_initialize_that_is_refused_leaves_the_earlier_one_on():
    model = net()
    optimizer = sgd(model)
    init(model, optimizer, "O1")
    with pytest.raises(AmpUsageError):
        init(net(), None, "O7")
    train(model, optimizer)


def test_enabled_false_does_nothing_and_ends_the_earlier_one():
    model, other = net(), net()
    optimizer, plain = sgd(model), sgd(other)
    init(net(), None, "O1")
    assert init(model, optimizer, enabled=False) == (model, optimizer)
    assert model(torch.ones(2, 4)).dtype is torch.float32
    assert train(model, optimizer) == train(other, plain)
    with pytest.raises(AmpStateError, match=r"enabled=False"):
        amp.load_state_dict({})


# Registered functions


def test_a_registered_function_of_torch_is_put_on_the_list():
    original = torch.sigmoid
    amp.register_float_function(torch, "sigmoid")
    amp.register_half_function(torch, "sqrt")
    amp.register_promote_function(torch, "hypot")
    assert torch.sigmoid(torch.ones(2, dtype=torch.float16)).dtype is torch.float16
    init(net(), None, "O1")
    assert torch.sigmoid is original
    assert torch.sigmoid(torch.ones(2, dtype=torch.float16)).dtype is torch.float32
    assert torch.sqrt(torch.ones(2)).dtype is torch.float16
    assert torch.hypot(torch.ones(2, dtype=torch.float16), torch.ones(2)).dtype is torch.float32
    amp.shutdown()
    assert torch.sigmoid(torch.ones(2, dtype=torch.float16)).dtype is torch.float16


def test_a_registered_function_of_torch_overrides_the_lists():
    amp.register_float_function(torch.nn.functional, "linear")
    amp.register_half_function(torch, "exp")
    init(net(), None, "O1")
    # A listed function goes where the program wants it, though autocast would cast it below.
    assert torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)).dtype is torch.float32
    assert torch.exp(torch.ones(2)).dtype is torch.float16
    model = nn.Linear(3, 4)
    assert model(torch.ones(2, 3)).dtype is torch.float32


def test_a_registered_function_elsewhere_is_wrapped_while_O1_is_on():
    seen = []

    class Space:
        @staticmethod
        def scale(x):
            seen.append(x.dtype)
            return x

    original = Space.scale
    amp.register_half_function(Space, "scale")
    for level, dtype in (("O1", torch.float16), ("O2", torch.float32), ("O1", torch.float16)):
        init(net(), None, level)
        Space.scale(torch.ones(2))
        assert seen[-1] is dtype
    amp.shutdown()
    assert Space.scale is original
    with pytest.raises(
        ValueError, match=r"register_half_function: .*Space.* has no function 'nothing'. Check the name"
    ):
        amp.register_half_function(Space, "nothing")


def test_a_function_registered_twice_is_wrapped_once_and_given_back():
    class Space:
        @staticmethod
        def f(x):
            return x.dtype

    original = Space.f
    amp.register_half_function(Space, "f")
    amp.register_float_function(Space, "f")
    init(net(), None, "O1")
    assert Space.f(torch.ones(1, dtype=torch.float16)) is torch.float32  # the last word counts
    amp.shutdown()
    assert Space.f is original


# Checkpoints


def saved(level):
    model = net()
    optimizer = sgd(model)
    init(model, optimizer, level)
    train(model, optimizer, 4)
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", [("model", "optimizer", "amp"), ("optimizer", "model", "amp"),
                                   ("amp", "optimizer", "model")])  # fmt: skip
def test_a_checkpoint_loads_in_any_order(level, order):
    state = saved(level)
    straight = net()
    optimizer = sgd(straight)
    init(straight, optimizer, level)
    train(straight, optimizer, 4)
    train(straight, optimizer, 3, seed=9)
    expected = weights(straight)
    expected_state = amp.state_dict()

    model = net(seed=3)
    optimizer = sgd(model)
    init(model, optimizer, level)
    targets = {"model": model, "optimizer": optimizer, "amp": amp}
    for part in order:
        targets[part].load_state_dict(copy.deepcopy(state[part]))
    train(model, optimizer, 3, seed=9)
    assert same(weights(model), expected)
    assert amp.state_dict() == expected_state


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_may_be_loaded_before_initialize(level):
    state = saved(level)
    model = net(seed=3)
    model.load_state_dict(state["model"])
    optimizer = sgd(model)
    init(model, optimizer, level)
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    amp.load_state_dict(state["amp"])
    train(model, optimizer, 3, seed=9)
    after = net(seed=4)
    optimizer = sgd(after)
    init(after, optimizer, level)
    after.load_state_dict(state["model"])
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    amp.load_state_dict(state["amp"])
    train(after, optimizer, 3, seed=9)
    assert same(weights(model), weights(after))


@pytest.mark.parametrize("exact", [True, False])
def test_loading_at_O2_is_exact(exact):
    model, source = net(), net(seed=7)
    optimizer = sgd(model)
    init(model, optimizer, "O2", exact_masters=exact)
    model.load_state_dict(source.state_dict())
    for master, weight, original in zip(
        amp.master_params(optimizer), model.parameters(), source.parameters(), strict=True
    ):
        assert master is weight
        assert torch.equal(weight, original)  # a checkpoint loses no digit, however the run began


# Optimizers


def test_a_parameter_group_added_at_O2_is_trained():
    model, head = net(), nn.Linear(2, 2)
    optimizer = sgd(model)
    exact = [p.detach().clone() for p in head.parameters()]
    init([model, head], optimizer, "O2")
    train(model, optimizer)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    masters = optimizer.param_groups[1]["params"]
    assert same([m.detach() for m in masters], exact)
    before = weights(head)
    optimizer.zero_grad()
    loss = head(model(torch.ones(2, 4))).pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not same(weights(head), before)


@pytest.mark.parametrize("level", LEVELS)
def test_delay_unscale_accumulates_scaled_gradients(level):
    batches = torch.randn(3, 6, 4)

    def run(delayed):
        model = net()
        optimizer = sgd(model)
        init(model, optimizer, level, loss_scale=64.0)
        optimizer.zero_grad()
        for i, x in enumerate(batches):
            loss = model(x).float().pow(2).mean() / 3
            with amp.scale_loss(loss, optimizer, delay_unscale=delayed and i < 2) as scaled:
                scaled.backward()
        return torch.cat([p.grad.float().flatten() for p in amp.master_params(optimizer)])

    # Half gradients (O2, O3) are summed in half where the unscaling is delayed: 2^-11 of each of three terms.
    tolerance = 0 if level in ("O0", "O1") else 2e-3
    torch.testing.assert_close(run(True), run(False), rtol=tolerance or 1e-6, atol=tolerance or 1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_the_dcgan_of_apexs_examples(level):
    """Two models, two optimizers, three losses with a scaler each; an overflow of one leaves the others alone."""
    generator, critic = net(1), nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    optimizer_d, optimizer_g = sgd(critic), sgd(generator)
    (critic, generator), (optimizer_d, optimizer_g) = init(
        [critic, generator], [optimizer_d, optimizer_g], level, num_losses=3, loss_scale="dynamic"
    )
    criterion = nn.BCEWithLogitsLoss()

    def step(factor=1.0):
        optimizer_d.zero_grad()
        real = criterion(critic(torch.randn(6, 2)).float(), torch.ones(6, 1)) * factor
        with amp.scale_loss(real, optimizer_d, loss_id=0) as scaled:
            scaled.backward()
        fake = generator(torch.randn(6, 4))
        wrong = criterion(critic(fake.detach()).float(), torch.zeros(6, 1))
        with amp.scale_loss(wrong, optimizer_d, loss_id=1) as scaled:
            scaled.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        fooled = criterion(critic(fake).float(), torch.ones(6, 1))
        with amp.scale_loss(fooled, optimizer_g, loss_id=2) as scaled:
            scaled.backward()
        optimizer_g.step()

    step()
    before_d, before_g = weights(critic), weights(generator)
    step(float("inf"))
    scales = [state["loss_scale"] for state in amp.state_dict().values()]
    assert scales == [2.0**15, 2.0**16, 2.0**16]
    assert same(weights(critic), before_d)  # the real loss overflowed: the critic's step was skipped
    assert not same(weights(generator), before_g)
    step()
    assert not same(weights(critic), before_d)


def test_one_loss_for_two_optimizers():
    first, second = net(1), nn.Linear(2, 2)
    optimizers = [sgd(first), sgd(second)]
    init([first, second], optimizers, "O2")
    loss = second(first(torch.ones(3, 4))).pow(2).mean()
    with amp.scale_loss(loss, optimizers) as scaled:
        scaled.backward()
    before = weights(first), weights(second)
    for optimizer in optimizers:
        optimizer.step()
    assert not same(weights(first), before[0])
    assert not same(weights(second), before[1])


# What wraps a model or repeats its forward pass


def test_an_overflow_in_one_loss_skips_all_its_optimizers_once():
    first, second = net(0), net(1)
    optimizers = sgd(first), sgd(second)
    init([first, second], list(optimizers), dtype=torch.float16)
    x = torch.randn(2, next(first.parameters()).shape[1])
    before = weights(first), weights(second)
    loss = first(x).float().sum() * float("inf") + second(x).float().sum() * 1e-3
    with amp.scale_loss(loss, list(optimizers)) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert same(weights(first), before[0])
    assert same(weights(second), before[1])
    for model, optimizer in zip((first, second), optimizers, strict=True):
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().sum() * 1e-3, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert not same(weights(first), before[0])
    assert not same(weights(second), before[1])


def test_a_wrapped_model_is_refused_before_and_accepted_after():
    for level in LEVELS:
        model = net()
        with pytest.raises(AmpUsageError, match=r"wrapped in DataParallel: expected the model itself. Wrap it after"):
            init(nn.DataParallel(model), sgd(model), level)
        init(model, sgd(model), level)
        out = nn.DataParallel(model)(torch.ones(4, 4))
        assert out.dtype is (torch.float16 if level == "O1" else torch.float32)


def replica_of(module):
    """Copies a module as DataParallel does for a device."""
    replica = module._replicate_for_data_parallel()
    replica._parameters = module._parameters.copy()
    replica._modules = {name: replica_of(child) for name, child in module._modules.items()}
    return replica


def in_threads(*models):
    """Calls the models as DataParallel does on its devices: a thread each, with autocast handed over."""
    results = [None] * len(models)
    models = [replica_of(model) for model in models]

    def call(index, model):
        try:
            results[index] = model(torch.ones(2, 4))
        except AmpUsageError as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_optimizer_of_a_pass_has_its_own_delay(level):
    model = [nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)]
    optimizers = [sgd(net) for net in model]
    init(model, optimizers, level, loss_scale=128.0)
    a, b = optimizers
    x = torch.ones(1, 4)

    def backward(factors, which, **how):
        loss = sum(factor * net(x).float().sum() for factor, net in zip(factors, model, strict=True) if factor)
        with amp.scale_loss(loss, which, **how) as scaled:
            scaled.backward()

    backward((0, 4), b)
    backward((8, 0), a, delay_unscale=True)
    backward((1, 2), optimizers)
    for optimizer, expected in ((a, 9.0), (b, 6.0)):
        (weight,) = amp.master_params(optimizer)
        assert torch.equal(weight.grad, torch.full_like(weight, expected))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_delayed_gradient_stays_scaled_in_every_optimizer_that_holds_its_parameter(level):
    model = nn.Linear(4, 2, bias=False)
    optimizers = [sgd(model), sgd(model)]
    init(model, optimizers, level, loss_scale=128.0)
    for factor, which, delay in ((8.0, optimizers[0], True), (1.0, optimizers, False)):
        with amp.scale_loss(factor * model(torch.ones(1, 4)).float().sum(), which, delay_unscale=delay) as scaled:
            scaled.backward()
    for optimizer in optimizers:
        (weight,) = amp.master_params(optimizer)
        assert torch.equal(weight.grad, torch.full_like(weight, 9.0))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_outputs_are_float32_on_every_thread_of_data_parallel(level):
    model = Meeting(net(), 2)
    init(model, sgd(model), level)
    with torch.no_grad():
        expected = copy.deepcopy(model.net).half()(torch.ones(2, 4).half())
    for out in in_threads(model, model):
        assert out.dtype is torch.float32
        assert torch.equal(out, expected.float())


class Meeting(nn.Module):
    """Waits in its forward pass until that many threads are in it."""

    def __init__(self, net, threads):
        super().__init__()
        self.net = net
        self.barrier = threading.Barrier(threads, timeout=60)

    def forward(self, x):
        self.barrier.wait()
        out = self.net(x)
        self.barrier.wait()
        return out


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_model_computes_the_same(level):
    results = []
    for compiled in (False, True):
        model = net()
        optimizer = sgd(model)
        init(model, optimizer, level)
        train(torch.compile(model, backend="eager") if compiled else model, optimizer)
        results.append(weights(model))
        amp.shutdown()
        torch._dynamo.reset()
    assert same(*results)


@pytest.mark.parametrize("make", [
    dict,
    OrderedDict,
    UserDict,
    lambda items: defaultdict(list, items),
    lambda items: list(items.values()),
    lambda items: deque(items.values(), maxlen=3),
])  # fmt: skip
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_containers_go_in_and_come_out_as_what_they_are(level, make):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, batch):
            x, number = batch.values() if hasattr(batch, "values") else batch
            assert number == 3
            return make({"x": self.layer(x), "n": number})

    model = Net()
    init(model, sgd(model), level)
    given = make({"x": torch.ones(5, 4), "n": 3})
    out = model(given)
    assert vars_of(out) == vars_of(given)
    assert next(floats(given)).dtype is torch.float32  # not changed itself
    assert next(floats(out)).dtype is torch.float32


def vars_of(container):
    return type(container), getattr(container, "default_factory", None), getattr(container, "maxlen", None)


def floats(container):
    values = container.values() if hasattr(container, "values") else container
    return (value for value in values if isinstance(value, torch.Tensor))


def test_sync_batch_norm_is_converted_before():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    init(model, sgd(model), "O2")
    assert isinstance(model[1], nn.SyncBatchNorm)
    seen = []
    model[1].register_forward_pre_hook(lambda m, a: seen.extend([a[0].dtype, m.weight.dtype, m.running_mean.dtype]))
    with contextlib.suppress(Exception):  # it needs a GPU
        model(torch.ones(2, 4))
    assert seen == [torch.float16, torch.float32, torch.float32]


class Checkpointed(nn.Module):
    """Repeats the forward pass of its middle, which has layers of every kind of cast, during the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.head = nn.Linear(4, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1))
        self.tail = nn.Linear(8, 2)

    def forward(self, x):
        x = self.head(x)
        x = self.middle(x) if self.reentrant is None else checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.tail(x)


@pytest.mark.parametrize("level", LEVELS)
def test_activation_checkpointing_changes_no_gradient(level):
    results = []
    for reentrant in (None, True, False):
        model = Checkpointed(reentrant)
        optimizer = sgd(model)
        init(model, optimizer, level)
        torch.manual_seed(2)
        loss = model(torch.randn(5, 4)).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        results.append([p.grad.clone() for p in amp.master_params(optimizer)])
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_of_the_model_is_exact_and_independent(level):
    model = net()
    optimizer = sgd(model)
    init(model, optimizer, level)
    average = copy.deepcopy(model)
    state = copy.deepcopy(model.state_dict())
    assert all(torch.equal(average.state_dict()[k], v) for k, v in state.items())
    x = torch.randn(3, 4)
    assert torch.equal(average(x), model(x))
    train(model, optimizer)
    assert all(torch.equal(average.state_dict()[k], v) for k, v in state.items())
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.mul_(0.5).add_(theirs, alpha=0.5)
    averaged = {k: v.clone() for k, v in average.state_dict().items()}
    for name, parameter in average.named_parameters():
        assert torch.equal(averaged[name].to(parameter.dtype), parameter)
    kept = weights(model)
    average.load_state_dict(state)
    assert same(weights(model), kept)
    assert all(torch.equal(average.state_dict()[k].half(), v.half()) for k, v in state.items())


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_keeps_a_model_alive(level):
    model = net()
    optimizer = sgd(model)
    init(model, optimizer, level)
    train(model, optimizer)
    watched = [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(optimizer)]
    amp.shutdown()
    del model, optimizer
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def test_evaluation_under_no_grad_does_not_poison_the_cache():
    model = net()
    optimizer = sgd(model)
    init(model, optimizer, "O1", loss_scale=1.0, cast_cache=True)
    with torch.no_grad():
        model(torch.ones(2, 4))
    loss = model(torch.ones(2, 4)).float().pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert all(p.grad is not None and p.grad.any() for p in (model[0].weight, model[2].weight))


def test_disable_casts_is_respected_by_decorated_functions():
    seen = []
    function = amp.half_function(lambda x: seen.append(x.dtype))
    init(net(), None, "O1")
    with amp.disable_casts():
        function(torch.ones(1))
    function(torch.ones(1))
    assert seen == [torch.float32, torch.float16]


def test_a_model_in_the_half_dtype_itself_is_refused():
    for dtype in (torch.float16, torch.bfloat16):
        model = net().to(dtype)
        with pytest.raises(AmpUsageError, match=r"whose '0.weight' is half precision: expected float32. Do not call"):
            init(model, sgd(model), "O2", dtype=dtype)


def test_a_schedule_may_begin_with_a_skipped_step():
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    init(model, optimizer, "O1", loss_scale="dynamic")
    with amp.scale_loss(model(torch.ones(2, 4)).float().mean() * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    scheduler.step()  # torch would warn of a forgotten optimizer.step(), and warnings are errors here


@pytest.mark.parametrize("scale", ["dynamic", 64.0])
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_gradients_of_other_kinds_are_unscaled(kind, scale):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(10, 4, sparse=kind == "sparse")
            self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64)) if kind == "complex" else None

        def forward(self, rows):
            found = self.table(rows).float()
            if self.filter is not None:
                found = torch.fft.irfft(torch.fft.rfft(found) * self.filter)
            return found.square().mean()

    gradients = []
    for scaled_by in (1.0, scale):
        model = Net()
        optimizer = sgd(model)
        init(model, optimizer, "O1", loss_scale=scaled_by)
        with amp.scale_loss(model(torch.tensor([1, 1, 3])), optimizer) as loss:
            loss.backward()
        gradients.append([p.grad.to_dense().clone() for p in model.parameters()])
        if scaled_by == "dynamic":
            with amp.scale_loss(model(torch.tensor([1, 2])) * float("inf"), optimizer) as loss:
                loss.backward()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        amp.shutdown()
    for plain, unscaled in zip(*gradients, strict=True):
        torch.testing.assert_close(unscaled, plain)


def test_spectral_norm_under_apex_lists():
    torch.manual_seed(0)
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    init(model, sgd(model), "O1")
    model(torch.ones(2, 4)).float().mean().backward()
    assert model.parametrizations.weight.original.grad.abs().sum() > 0
    assert torch.vdot(torch.ones(2), torch.ones(2, dtype=torch.float16)).dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("batches", [1, 2])
def test_an_overflow_whose_gradients_are_dropped_skips_no_later_step(level, batches):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    amp.initialize(net, optimizer, opt_level=level, dtype=torch.float16, max_loss_scale=128.0, verbosity=0)
    moved = []
    for number in range(4):
        optimizer.zero_grad()
        for k in range(batches):
            loss = net(torch.randn(4, 4)).float().square().mean() * (float("inf") if number == 1 else 1.0)
            with amp.scale_loss(loss, optimizer, delay_unscale=k < batches - 1) as scaled:
                scaled.backward()
        norm = nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 1.0)
        if not torch.isfinite(norm):  # as many loops do
            moved.append(None)
            continue
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        optimizer.step()
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True)))
    assert moved == [True, None, True, True]
