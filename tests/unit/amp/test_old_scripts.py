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


def adversaries(first, second, together=False, factors=(1.0, 1.0, 1.0)):
    """Trains a generator and a critic, and returns their weights before the last pair of steps and at the end."""
    generator, critic = net(1), net(2, outputs=1)
    optimizer_g, optimizer_d = sgd(generator), sgd(critic)
    if together:
        init([generator, critic], [optimizer_g, optimizer_d], first, loss_scale="dynamic")
    else:
        init(generator, optimizer_g, first, loss_scale="dynamic")
        init(critic, optimizer_d, second, loss_scale="dynamic")
    torch.manual_seed(3)
    for factor in factors:
        before = weights(generator), weights(critic)
        noise = torch.randn(6, 4)
        optimizer_d.zero_grad()
        backward(critic(generator(noise).detach()).float().square().mean(), optimizer_d)
        optimizer_d.step()
        optimizer_g.zero_grad()
        backward((critic(generator(noise)).float() - 1).square().mean() * factor, optimizer_g)
        optimizer_g.step()
    return before, (weights(generator), weights(critic))


@pytest.mark.parametrize("level", LEVELS)
def test_two_calls_train_as_one(level):
    _, (generator, critic) = adversaries(level, level)
    scales = amp.state_dict()
    amp.shutdown()
    _, together = adversaries(level, level, together=True)
    assert same(generator, together[0])
    assert same(critic, together[1])
    assert scales == amp.state_dict()


@pytest.mark.parametrize(("first", "second"), list(itertools.product(LEVELS, LEVELS)))
def test_models_of_two_calls_move_and_skip_on_their_own(first, second):
    (old_g, old_d), (new_g, new_d) = adversaries(first, second, factors=(1.0, float("inf")))
    assert same(old_g, new_g)  # its loss overflowed
    assert not any(torch.equal(a, b) for a, b in zip(old_d[-2:], new_d[-2:], strict=True))
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 0}
    amp.shutdown()
    (old_g, _), (new_g, _) = adversaries(first, second)
    assert not any(torch.equal(a, b) for a, b in zip(old_g[-2:], new_g[-2:], strict=True))
    assert all(p.isfinite().all() for p in new_g)


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


@pytest.mark.parametrize("level", LEVELS)
def test_a_teacher_may_be_initialized_after_its_student(level):
    student, teacher = net(1), net(2)
    optimizer = sgd(student)
    init(student, optimizer, level, loss_scale="dynamic", num_losses=2)
    init(teacher, None, level, loss_scale="dynamic")
    assert list(amp.state_dict()) == ["loss_scaler0"]  # those of the last call
    for factor, moves in ((1.0, True), (float("nan"), False), (1.0, True)):
        before = weights(student)
        with torch.no_grad():
            goal = teacher(torch.ones(3, 4)).float()
        optimizer.zero_grad()
        backward((student(torch.ones(3, 4)).float() - goal).square().mean() * factor, optimizer)
        optimizer.step()
        assert same(before, weights(student)) is not moves


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


def test_masters_are_refused_after_enabled_false():
    for level, refused in (("O1", False), ("O2", True)):
        student, teacher = net(1), net(2)
        optimizer = sgd(student)
        init(student, optimizer, level)
        init(teacher, None, level, enabled=False)
        if refused:
            with pytest.raises(AmpUsageError, match=r"updates O2's masters, after an initialize with enabled=False"):
                step(student, optimizer)
        else:
            before = weights(student)
            step(student, optimizer)
            assert not same(before, weights(student))
        amp.shutdown()


# Weights that are set after initialize


def set_inside(model):
    for p in model.parameters():
        p.data.fill_(0.5)


def set_under_no_grad(model):
    for p in model.parameters():
        nn.init.constant_(p, 0.5)


def set_anew(model):
    for p in model.parameters():
        p.data = torch.full_like(p, 0.5)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("change", [set_inside, set_under_no_grad, set_anew])
@pytest.mark.parametrize("before_backward", [True, False])
def test_weights_set_after_initialize_are_kept(change, exact, before_backward):
    model = net()
    optimizer = sgd(model, lr=0.0)
    init(model, optimizer, "O2", exact_masters=exact)
    change(model)
    if before_backward:
        step(model, optimizer)
    else:
        optimizer.step()
    assert all((p == 0.5).all() for p in (*model.parameters(), *amp.master_params(optimizer)))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("level", LEVELS)
def test_a_frozen_network_that_the_program_moves_stays_where_it_is_put(level, kind):
    online, target = net(), net().requires_grad_(False)
    optimizer = kind([*online.parameters(), *target.parameters()], lr=0.05)  # of both, as BYOL's scripts have it
    init([online, target], optimizer, level)
    for _ in range(2):
        backward(online(torch.ones(2, 4)).square().mean(), optimizer)
        for param in target.parameters():
            param.data = param.data * 0 + 2  # as a moving average assigns its own
        optimizer.step()
    assert all(bool((param == 2).all()) for param in target.parameters())
    assert all(bool((value == 2).all()) for value in target.state_dict().values())


def test_a_network_that_is_frozen_before_its_step_takes_the_step():
    model, other = net(), net()
    optimizer, reference = sgd(model), sgd(other)
    init(model, optimizer, "O2", loss_scale=1.0)
    for each, which in ((model, optimizer), (other, reference)):
        loss = each(torch.ones(2, 4)).square().mean()
        backward(loss, which) if each is model else loss.backward()
        each.requires_grad_(False)
        which.step()
    assert torch.allclose(model[0].weight.float(), other[0].weight, atol=1e-3)
    assert not torch.allclose(other[0].weight, net()[0].weight, atol=1e-3)


def test_what_is_not_set_stays_exact():
    model = net()
    start = weights(model)
    optimizer = sgd(model, lr=0.0)
    init(model, optimizer, "O2")
    model[0].weight.data[0] = 0.5
    step(model, optimizer)
    start[0][0] = 0.5
    assert same(list(amp.master_params(optimizer)), start)


def test_weights_are_followed_until_the_first_backward_pass():
    model = net()
    optimizer = sgd(model, lr=0.0)
    init(model, optimizer, "O2")
    start = list(weights(model))
    step(model, optimizer)
    set_inside(model)
    step(model, optimizer)
    assert same(weights(model), start)  # as in apex, the masters have the last word from then on


def test_masters_set_after_initialize_are_kept():
    model, saved = net(), net(5)
    optimizer = sgd(model, lr=0.0)
    init(model, optimizer, "O2")
    for master, own in zip(amp.master_params(optimizer), saved.parameters(), strict=True):
        master.data.copy_(own.data)
    step(model, optimizer)
    assert same(list(amp.master_params(optimizer)), weights(saved))
    assert same(weights(model), [p.half() for p in weights(saved)])


def test_loading_after_initialize_stays_exact():
    model, saved = net(), net(5)
    optimizer = sgd(model, lr=0.0)
    init(model, optimizer, "O2")
    model.load_state_dict(saved.state_dict())
    step(model, optimizer)
    assert same(list(amp.master_params(optimizer)), weights(saved))


# Weights that change without a step


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


# Pickles and TorchScript


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


def test_a_copied_optimizer_at_O2_stands_alone():
    model = net()
    optimizer = sgd(model)
    init(model, optimizer, "O2")
    step(model, optimizer)
    other = copy.deepcopy(optimizer)
    other.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert [len(o.param_groups) for o in (optimizer, other)] == [1, 2]
    assert {type(p) for p in amp.master_params(other)} == {nn.Parameter}


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_an_O1_model_is_scripted_and_traced():
    model, x = net(), torch.ones(2, 4)
    init(model, sgd(model), "O1")
    expected = model(x)
    for script in (torch.jit.script(model), torch.jit.trace(model, x)):
        torch.testing.assert_close(script(x), expected)


# What lies inside, and wrappers


@pytest.mark.parametrize(
    ("name", "instead"),
    [("_amp_state", "amp.load_state_dict({"), ("_amp_state", 'amp.state_dict()["loss_scaler0"]["loss_scale"]'),
     ("_amp_state", "amp.shutdown() for handle._deactivate()"), ("lists", "amp.register_half_function(torch.nn.functi"),
     ("init", "amp.initialize(model, optimizer")],
)  # fmt: skip
def test_a_private_name_of_apex_says_what_to_write(name, instead):
    with pytest.raises(AttributeError) as caught:
        getattr(amp, name)
    assert instead in str(caught.value)
    assert not hasattr(amp, name)
    assert name not in dir(amp)


def test_another_missing_name_is_missed_as_ever():
    with pytest.raises(AttributeError, match=r"^module 'lightning_turbo.amp' has no attribute 'nothing'$"):
        amp.nothing


class Wrapper:
    """Says that it is an optimizer, as bolts' LARSWrapper."""

    def __init__(self, optimizer):
        self.optim = optimizer
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad

    @property
    def __class__(self):
        return torch.optim.Optimizer

    param_groups = property(lambda self: self.optim.param_groups)
    state = property(lambda self: self.optim.state)


def test_a_wrapper_that_says_it_is_an_optimizer_is_refused_at_O2():
    model, other = net(), net()
    before, optimizer = weights(model), sgd(other)
    init(other, optimizer, "O2")
    with pytest.raises(AmpUsageError, match=r"O2 was given a Wrapper, which wraps .* Pass the optimizer in it; .*lars"):
        init(model, Wrapper(sgd(model)), "O2")
    assert same(weights(model), before)  # as it was
    step(other, optimizer)  # what was initialized before goes on
    init(model, Wrapper(sgd(model)), "O1")


def test_LARC_is_refused_with_what_to_take():
    class LARC:
        def __init__(self, optimizer):
            self.optim = optimizer

    model = net()
    with pytest.raises(TypeError, match=r"LARC is none. Pass the optimizer in it; .* take lightning_turbo.lars\(model"):
        init(model, LARC(sgd(model)), "O1")
