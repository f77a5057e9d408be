"""What scripts for apex do around their loops: initialize twice, set weights late, load, pickle, look inside."""

import copy
import io
import itertools
import logging

import pytest
import torch
from torch import nn

from lightning_turbo import amp
from lightning_turbo.errors import AmpStateError, AmpUsageError

LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()


def net(seed=0, outputs=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr)


def init(models, optimizers=None, level="O1", **kwargs):
    return amp.initialize(models, optimizers, opt_level=level, **{"dtype": torch.float16, "verbosity": 0, **kwargs})


def backward(loss, optimizers, **kwargs):
    with amp.scale_loss(loss, optimizers, **kwargs) as scaled:
        scaled.backward()


def step(model, optimizer, factor=1.0):
    optimizer.zero_grad()
    backward(model(torch.ones(3, 4)).float().square().mean() * factor, optimizer)
    optimizer.step()


def weights(*models):
    return [p.detach().clone() for model in models for p in model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Two calls of initialize


def adversaries(calls, factors=(1.0, 1.0, 1.0)):
    """Trains a generator and a critic at the levels of one or two calls; returns which networks the last step moved."""
    nets = net(1), net(2, outputs=1)
    optimizers = [sgd(model) for model in nets]
    if len(calls) == 1:
        init(list(nets), optimizers, *calls, loss_scale="dynamic")
    else:
        for model, optimizer, level in zip(nets, optimizers, calls, strict=True):
            init(model, optimizer, level, loss_scale="dynamic")
    generator, critic = nets
    optimizer_g, optimizer_d = optimizers
    torch.manual_seed(3)
    for factor in factors:
        before = [weights(model) for model in nets]
        noise = torch.randn(6, 4)
        optimizer_d.zero_grad()
        backward(critic(generator(noise).detach()).float().square().mean(), optimizer_d)
        optimizer_d.step()
        optimizer_g.zero_grad()
        backward((critic(generator(noise)).float() - 1).square().mean() * factor, optimizer_g)
        optimizer_g.step()
    return [not same(old, weights(model)) for old, model in zip(before, nets, strict=True)], weights(*nets)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(LEVELS, LEVELS)))
def test_models_of_two_calls_move_and_skip_on_their_own(first, second):
    assert adversaries((first, second), factors=(1.0, float("inf")))[0] == [
        False,
        True,
    ]  # the first one's loss overflowed
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 0}
    amp.shutdown()
    moved, after = adversaries((first, second))
    assert moved == [True, True]
    if first == second:  # trains as one call does
        scales = amp.state_dict()
        amp.shutdown()
        assert same(after, adversaries((first,))[1])
        assert scales == amp.state_dict()


@pytest.mark.parametrize("level", LEVELS)
def test_one_loss_for_optimizers_of_two_calls(level):
    first, second = net(1), net(2)
    optimizers = [sgd(first), sgd(second)]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        init(model, optimizer, level, loss_scale="dynamic")
    for factor, moves in ((1.0, True), (float("inf"), False)):
        before = weights(first), weights(second)
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(second(first(torch.ones(3, 4))).float().square().mean() * factor, optimizers)
        for optimizer in optimizers:
            optimizer.step()
        assert [not same(b, weights(m)) for b, m in zip(before, (first, second), strict=True)] == [moves, moves]
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 0}


def test_gradients_of_two_calls_accumulate_scaled():
    first, second = net(1), net(2)
    optimizers = [sgd(first), sgd(second)]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        init(model, optimizer, "O2", loss_scale=64.0)
    for delay in (True, False):
        backward(second(first(torch.ones(3, 4))).float().mean(), optimizers, delay_unscale=delay)
    twice = [p.grad.clone() for optimizer in optimizers for p in amp.master_params(optimizer)]
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(second(first(torch.ones(3, 4))).float().mean(), optimizers)
    once = [p.grad for optimizer in optimizers for p in amp.master_params(optimizer)]
    torch.testing.assert_close(twice, [2 * grad for grad in once])


def test_shutdown_ends_all_calls():
    first, second = net(1), net(2)
    optimizer = sgd(first)
    init(first, optimizer, "O1")
    init(second, sgd(second), "O1")
    amp.shutdown()
    assert first(torch.ones(1, 4)).dtype is torch.float32
    assert torch._C._len_torch_function_stack() == 0
    with pytest.raises(AmpStateError, match="Call initialize first"):
        backward(first(torch.ones(1, 4)).mean(), optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_comes_again_after_shutdown(level):
    model = net()
    init(model, sgd(model), level)
    if level in ("O2", "O3"):
        with pytest.raises(AmpUsageError, match=f"an earlier initialize prepared for {level}.*Call amp.shutdown"):
            init(model, sgd(model), level)
    amp.shutdown()
    optimizer = sgd(model)
    init(model, optimizer, level)
    before = weights(model)
    step(model, optimizer)
    assert not same(before, weights(model))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_that_is_not_known_or_comes_twice_is_refused(level):
    model = net()
    first = sgd(model)
    init(model, first, level)
    for other in (sgd(model), copy.deepcopy(first)):
        with pytest.raises(AmpUsageError, match=r"given a SGD that amp.initialize has not seen.*initialize again"):
            step(model, other)
    models = [net(1), net(2)]
    shared = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=0.1, fused=True)
    with pytest.raises(AmpUsageError, match=r"given a AdamW that it has been given before"):
        init(models, [shared, shared], level)


class Wrapper:
    """Says that it is an optimizer, as bolts' LARSWrapper."""

    def __init__(self, optimizer):
        self.optim = optimizer

    @property
    def __class__(self):
        return torch.optim.Optimizer


def test_a_wrapper_that_says_it_is_an_optimizer_is_refused():
    model, other = net(), net()
    before, optimizer = weights(model), sgd(other)
    init(other, optimizer)
    with pytest.raises(TypeError, match=r"is a Wrapper: expected a torch.optim.*Of a wrapper.*pass the object in it"):
        init(model, Wrapper(sgd(model)))
    assert same(weights(model), before)
    step(other, optimizer)  # what was initialized before goes on


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_closure_is_cast_at_O1_and_the_step_around_it_is_not(kind, dtype):
    seen = []

    class Looking(kind):
        def step(self, closure):
            seen.append(nn.functional.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype)
            return super().step(closure)

    model = nn.Linear(4, 1)
    model.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    optimizer = Looking(model.parameters(), lr=0.01)
    init(model, optimizer, "O1", dtype=dtype, loss_scale=1.0)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().square().mean()
        backward(loss, optimizer)
        return loss

    assert optimizer.step(closure).requires_grad
    assert seen[0] is torch.float32
    assert set(seen[1:]) == {dtype}
    with pytest.raises(KeyError):
        optimizer.step(lambda: {}["fails"])
    backward(model(torch.ones(2, 4)).float().mean(), optimizer)
    assert model(torch.ones(2, 4)).dtype is dtype


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


# Weights that change without a step


@pytest.mark.parametrize("level", LEVELS)
def test_a_frozen_network_that_the_program_moves_stays_where_it_is_put(level):
    online, target = net(), net().requires_grad_(False)
    optimizer = torch.optim.AdamW([*online.parameters(), *target.parameters()], lr=0.05)  # as BYOL's scripts have it
    init([online, target], optimizer, level)
    for _ in range(2):
        backward(online(torch.ones(2, 4)).square().mean(), optimizer)
        for param in target.parameters():
            param.data = param.data * 0 + 2  # as a moving average assigns its own
        optimizer.step()
    assert all(bool((value == 2).all()) for value in (*target.parameters(), *target.state_dict().values()))


@pytest.mark.parametrize("change", [
    lambda p: p.data.fill_(0.5), lambda p: nn.init.constant_(p, 0.5), lambda p: setattr(p, "data", p.data * 0 + 0.5),
], ids=["inside", "under no_grad", "new"])  # fmt: skip
def test_weights_may_be_set_at_any_time(change):
    model = net()
    optimizer = sgd(model, lr=0.0)
    init(model, optimizer, "O2")
    step(model, optimizer)
    for param in model.parameters():
        change(param)
    expected = copy.deepcopy(model).half()(torch.ones(1, 4).half()).float()
    assert torch.equal(model(torch.ones(1, 4)), expected)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_O1_computes_with_the_weights_of_now(context):
    folds = [net(1), net(2)]
    model, x = net(), torch.ones(3, 4)
    init(model, None, "O1")
    expected = [fold(x) for fold in folds]
    with context():
        loaded = [(model.load_state_dict(fold.state_dict()), model(x))[1] for fold in folds]
    assert same(loaded, expected)
    with torch.no_grad():
        model(x)
        for mine, shadow in zip(model.parameters(), folds[0].parameters(), strict=True):
            mine.data = shadow.data
        assert torch.equal(model(x), expected[0])


# Skipped steps


@pytest.mark.parametrize("verbosity", [0, 1])
def test_a_skipped_step_is_said(verbosity, caplog):
    model = net()
    optimizer = sgd(model)
    init(model, optimizer, "O1", verbosity=verbosity)
    with caplog.at_level(logging.WARNING, logger="lightning_turbo.amp"):
        step(model, optimizer)
        assert not caplog.messages
        step(model, optimizer, float("nan"))
    said = "Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 32768"
    assert caplog.messages == [said] * verbosity


def test_a_scale_of_zero_ends_the_run():
    model = net()
    optimizer = sgd(model)
    init(model, optimizer, "O1")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**-148, "unskipped": 0}})
    step(model, optimizer, float("nan"))
    with pytest.raises(AmpStateError, match="Loss scaler 0 has halved its scale down to zero"):
        step(model, optimizer, float("nan"))


# Pickles


def pickled(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_model_and_optimizer_are_pickled_whole(level, trained):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    init(model, optimizer, level, cast_model_outputs=torch.float32)
    if trained:
        step(model, optimizer)
    x = torch.ones(2, 4)
    copies = pickled(model), pickled(optimizer)
    assert torch.equal(copies[0](x), model(x))
    assert same(weights(copies[0]), weights(model))
    assert type(copies[1]) is torch.optim.SGD
    assert same(amp.master_params(copies[1]), amp.master_params(optimizer))
    assert len(copies[1].state_dict()["state"]) == len(optimizer.state_dict()["state"])
    before = weights(model)
    copies[1].step()
    assert same(weights(model), before)
