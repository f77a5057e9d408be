"""Plain loops and scripts written for apex, with only the import changed."""

import copy
import gc
import io
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from lightning_turbo import amp
from lightning_turbo.errors import AmpStateError, AmpUsageError
from tests.amp.loops import INF, LEVELS, backward, init, net, ready, same, sgd, weights


def train(model, optimizer, steps=3, seed=5):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4, generator=generator)).float().pow(2).mean()
        backward(loss, optimizer)
        optimizer.step()
    return float(loss.detach())


def step(model, optimizer, factor=1.0):
    optimizer.zero_grad()
    backward(model(torch.ones(3, 4)).float().square().mean() * factor, optimizer)
    optimizer.step()


# Calls to initialize


@pytest.mark.parametrize(("first", "second"), [("O1", "O2"), ("O2", "O1"), ("O2", "O3"), ("O3", "O2"), ("O3", "O0")])
def test_initialize_may_be_called_again_for_a_model(first, second):
    ends = []
    for levels in ((first, second), (second,)):
        model = net().half().float()  # O3 rounds nothing more
        for level in levels:
            init(model, optimizer := sgd(model), level)
        ends.append([train(model, optimizer), weights(model)])
        amp.shutdown()
    assert ends[0][0] == ends[1][0]
    assert same(ends[0][1], ends[1][1])


def test_initialize_with_enabled_false_ends_the_previous_amp():
    model = net()
    optimizer = sgd(model)
    init(net(), None, "O1")
    assert init(model, optimizer, enabled=False) == (model, optimizer)
    assert model(torch.ones(2, 4)).dtype is torch.float32
    step(model, optimizer)
    with pytest.raises(AmpStateError, match=r"enabled=False"):
        amp.load_state_dict({})


@pytest.mark.parametrize("level", LEVELS)
def test_a_second_initialize_ends_the_first(level):
    first, optimizer = ready(level)
    _, active = ready("O0")
    assert first(torch.ones(1, 4)).dtype is torch.float32
    assert {p.dtype for p in first.parameters()} == {torch.float32}
    assert torch._C._len_torch_function_stack() == 0
    for other in (optimizer, copy.deepcopy(active)):
        with pytest.raises(AmpUsageError, match=r"the last amp.initialize, got another SGD.*in one call, as lists"):
            step(first, other)
    amp.shutdown()
    with pytest.raises(AmpStateError, match="Call initialize first"):
        step(first, optimizer)


@pytest.mark.parametrize("wraps", ["before", "during"])
def test_after_amp_ends_a_wrapped_optimizer_has_its_original_step(wraps):
    """A scheduler wraps the step, and torch keeps the wrapper on the optimizer."""
    model = net()
    optimizer = sgd(model)
    if wraps == "before":
        LambdaLR(optimizer, lambda _: 1.0)
    wrapper = vars(optimizer).get("step")
    init(model, optimizer, "O2")
    if wraps == "during":
        LambdaLR(optimizer, lambda _: 1.0)
    amp.shutdown()
    if wraps == "before":
        assert vars(optimizer)["step"] is wrapper is not None
    before = weights(model)
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    assert not same(before, weights(model))


def test_a_scaler_without_an_entry_in_the_state_dict_keeps_its_state(caplog):
    ready("O2", num_losses=2, loss_scale="dynamic")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}})
    assert [each["loss_scale"] for each in amp.state_dict().values()] == [8.0, 2.0**16]
    assert caplog.messages == ["The state has 1 loss scalers, this run 2."]


class Wrapper:
    """Claims to be an optimizer, as bolts' LARSWrapper does."""

    def __init__(self, optimizer):
        self.optim = optimizer

    @property
    def __class__(self):
        return torch.optim.Optimizer


@pytest.mark.parametrize(("level", "wrap", "said"), [
    ("O7", lambda optimizer: optimizer, "opt_level: expected"),
    ("O1", lambda optimizer: [optimizer, optimizer], "expected each optimizer once, got one twice"),
    ("O1", Wrapper, "optimizers: expected a torch.optim.*for a wrapper such as LARC, its content.*got <.*Wrapper"),
])  # fmt: skip
def test_a_failed_initialize_keeps_the_previous_amp(level, wrap, said):
    model, (earlier, optimizer) = net(), ready()
    with pytest.raises(TypeError if wrap is Wrapper else AmpUsageError, match=said):
        init(model, wrap(sgd(model)), level)
    step(earlier, optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_a_loop_without_scale_loss_trains_without_a_scale(level):
    model, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    plain.load_state_dict(model.state_dict())
    for each, which in ((model, sgd(model)), (plain, sgd(plain))):
        if each is model:
            init(model, which, level)
        for _ in range(5):
            which.zero_grad()
            each(torch.ones(1, 2)).float().sum().backward()
            which.step()
    torch.testing.assert_close(model.weight.float(), plain.weight, rtol=0.02, atol=2e-3)


# Checkpoints


@pytest.mark.parametrize(("level", "order"), [
    ("O1", ("model", "optimizer", "amp")), ("O2", ("optimizer", "model", "amp")), ("O3", ("amp", "optimizer", "model")),
])  # fmt: skip
def test_a_checkpoint_loads_in_any_order(level, order):
    straight, optimizer = ready(level)
    train(straight, optimizer, 4)
    parts = {"model": straight, "optimizer": optimizer, "amp": amp}
    state = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
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


# Optimizers


# Wrappers of a model, and repeated forward passes


def replica_of(module):
    """Return a copy of a module as DataParallel makes for each device."""
    replica = module._replicate_for_data_parallel()
    replica._parameters = module._parameters.copy()
    replica._modules = {name: replica_of(child) for name, child in module._modules.items()}
    return replica


def test_delay_unscale_is_tracked_for_each_parameter():
    """The first gradient is still scaled and belongs to two optimizers. The second one was unscaled before."""
    models = [nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)]
    first = sgd(models[0])
    both = torch.optim.SGD([model.weight for model in models], lr=0.1)
    init(models, [first, both], "O2", loss_scale=128.0)

    def backward_of(factors, which, **how):
        loss = sum(factor * net(torch.ones(1, 4)).float().sum() for factor, net in zip(factors, models, strict=True))
        backward(loss, which, **how)

    backward_of((3, 4), both)
    backward_of((8, 0), first, delay_unscale=True)
    backward_of((1, 2), [first, both])
    for weight, expected in zip(amp.master_params(both), (12.0, 6.0), strict=True):
        assert torch.equal(weight.grad, torch.full_like(weight, expected))


def test_an_accumulation_window_uses_the_scale_of_one_loss():
    model, optimizer = ready("O1", num_losses=2)
    for loss_id in (1, 1):
        backward(model(torch.ones(1, 4)).float().sum(), optimizer, loss_id=loss_id, delay_unscale=True)
    with pytest.raises(AmpUsageError, match="loss_id=0: expected loss_id=1, whose scaled gradients"):
        backward(model(torch.ones(1, 4)).float().sum(), optimizer)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize(("delayed", "when"), [
    (True, "register_hook"),  # before there is a gradient
    (False, "register_post_accumulate_grad_hook"),  # after it
])  # fmt: skip
def test_a_failed_backward_pass_loses_no_gradient(level, delayed, when):
    model = nn.Linear(4, 2, bias=False)
    optimizer = sgd(model)
    init(model, optimizer, level, loss_scale=128.0)
    backward(3 * model(torch.ones(1, 4)).float().sum(), optimizer)
    handle = getattr(model.weight, when)(lambda _: {}["no such key"])
    with pytest.raises(KeyError):
        backward(model(torch.ones(1, 4)).float().sum(), optimizer, delay_unscale=delayed)
    handle.remove()
    backward(model(torch.ones(1, 4)).float().sum(), optimizer)
    (weight,) = amp.master_params(optimizer)
    assert torch.equal(weight.grad, torch.full_like(weight, 4.0))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_replicas_of_data_parallel_are_refused(level):
    model = net()
    init(model, sgd(model), level)
    with pytest.raises(AmpUsageError, match="expected one process per device, got DataParallel"):
        replica_of(model)(torch.ones(2, 4))


@pytest.mark.parametrize("make", [
    dict, OrderedDict, UserDict, lambda items: defaultdict(list, items), lambda items: list(items.values()),
    lambda items: deque(items.values()),
])  # fmt: skip
def test_containers_keep_their_types_as_inputs_and_outputs(make):
    class Net(nn.Linear):
        def forward(self, batch):
            x, number = batch.values() if hasattr(batch, "values") else batch
            assert number == 3
            return make({"x": super().forward(x), "n": number})

    model = Net(4, 2)
    init(model, sgd(model), "O2")
    given = make({"x": torch.ones(5, 4), "n": 3})
    out = model(given)
    assert vars_of(out) == vars_of(given)
    assert next(floats(given)).dtype is torch.float32  # the argument is not changed
    assert next(floats(out)).dtype is torch.float32


class Batch:
    """An object of the user's, which may refer back to itself."""

    def __init__(self, x):
        self.x, self.parent = x, self

    def to(self, where):
        raise NotImplementedError


def test_an_object_passes_as_it_is_and_layers_cast_what_is_in_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, batch):
            assert batch.x.dtype is torch.float32
            return self.layer(batch.x)

    model, given = Net(), Batch(torch.ones(5, 4))
    init(model, sgd(model), "O2")
    assert model(given).dtype is torch.float32
    assert given.parent is given


def test_a_module_in_a_batch_is_not_changed():
    class Net(nn.Linear):
        def forward(self, batch):
            assert batch["teacher"] is teacher
            return super().forward(batch["x"])

    teacher, model = nn.Linear(4, 2), Net(4, 2)
    init(model, sgd(model), "O2")
    model({"x": torch.ones(5, 4), "teacher": teacher})


def vars_of(container):
    return type(container), getattr(container, "default_factory", None)


def floats(container):
    values = container.values() if hasattr(container, "values") else container
    return (value for value in values if isinstance(value, torch.Tensor))


class Checkpointed(nn.Module):
    """Uses activation checkpointing for its middle part, which has layers with every kind of cast."""

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
def test_activation_checkpointing_recomputes_the_same_gradients(level):
    """Calls two networks before the backward pass of either, in each of two steps."""
    results = []
    for reentrant in (None, True, False):
        models = [Checkpointed(reentrant) for _ in range(2)]
        optimizer = sgd(nn.ModuleList(models))
        init(models, optimizer, level)
        torch.manual_seed(2)
        for _ in range(2):
            losses = [model(torch.randn(5, 4)).float().pow(2).mean() for model in models]
            for loss in losses:
                backward(loss, optimizer)
        results.append([p.grad.clone() for p in amp.master_params(optimizer)])
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_amp_does_not_keep_a_model_alive():
    watched = []
    for level in LEVELS:
        model, optimizer = ready(level)
        train(model, optimizer)
        watched += [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(optimizer)]
        amp.shutdown()
    del model, optimizer
    gc.collect()
    assert [ref() for ref in watched] == [None] * 12


@pytest.mark.parametrize("scale", ["dynamic", 64.0])
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_sparse_and_complex_gradients_are_unscaled(kind, scale):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(10, 4, sparse=kind == "sparse")
            if kind == "complex":
                self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, rows):
            found = self.table(rows).float()
            if kind == "complex":
                found = torch.fft.irfft(torch.fft.rfft(found) * self.filter)
            return found.square().mean()

    gradients = []
    for scaled_by in (1.0, scale):
        model = Net()
        optimizer = sgd(model)
        init(model, optimizer, "O1", loss_scale=scaled_by)
        backward(model(torch.tensor([1, 1, 3])), optimizer)
        backward(model(torch.tensor([3, 4])), optimizer)
        gradients.append([p.grad.to_dense().clone() for p in model.parameters()])
        if scaled_by == "dynamic":
            backward(model(torch.tensor([1, 2])) * INF, optimizer)
            before = weights(model)
            optimizer.step()
            assert same(weights(model), before)
        amp.shutdown()
    for plain, unscaled in zip(*gradients, strict=True):
        torch.testing.assert_close(unscaled, plain)


@pytest.mark.parametrize("order", [(True, False), (False, True), (True, True)])
def test_an_accumulation_window_adds_sparse_and_dense_gradients(order):
    class Tied(nn.Embedding):
        def forward(self, sparse):
            return nn.functional.embedding(torch.tensor([1, 3]), self.weight, sparse=sparse)

    model, optimizer = ready("O1", Tied(10, 4), loss_scale=64.0)
    for sparse in order:
        backward(model(sparse).float().sum(), optimizer)
    expected = torch.zeros(10, 4)
    expected[[1, 3]] = 2.0
    assert torch.equal(model.weight.grad.to_dense(), expected)


# Pickles


def pickled(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("level", LEVELS)
def test_model_and_optimizer_can_be_pickled(level):
    model, optimizer = ready(level, cast_model_outputs=torch.float32)
    step(model, optimizer)
    x = torch.ones(2, 4)
    copies = pickled(model), pickled(optimizer)
    assert same(weights(copies[0]), [weight.float() for weight in weights(model)])
    if level in ("O0", "O1"):  # at O2 and O3 the unpickled copy is the float32 network
        assert torch.equal(copies[0](x).float(), model(x))
    assert type(copies[1]) is torch.optim.SGD
    assert same(amp.master_params(copies[1]), amp.master_params(optimizer))
    assert len(copies[1].state_dict()["state"]) == len(optimizer.state_dict()["state"])
    before = weights(model)
    copies[1].step()
    assert same(weights(model), before)
