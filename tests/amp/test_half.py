"""A call of a network at O2 and O3: buffers, weights outside of the module tree, inputs, outputs, writes."""

import copy

import pytest
import torch
from torch import nn

from lightning_turbo import amp
from lightning_turbo.errors import AmpUsageError, TurboWarning
from tests.amp.loops import backward, initialized, sgd

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=["O2", "O3"])
def level(request):
    return request.param


# Buffers of modules without weights keep their precision


def frequencies(width):
    return 10000.0 ** -(torch.arange(0, width, 2) / width)


class Rotary(nn.Module):
    """Computes rotary angles in each call, as in the Llama model of transformers."""

    def __init__(self, width, length):
        super().__init__()
        self.register_buffer("frequencies", frequencies(width), persistent=False)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return torch.arange(x.shape[1]).float()[:, None] * self.frequencies[None].float()


class Table(nn.Module):
    """Holds all angles in a buffer."""

    def __init__(self, width, length):
        super().__init__()
        self.register_buffer("angles", torch.outer(torch.arange(length).float(), frequencies(width)))

    def forward(self, x):
        return self.angles[: x.shape[1]]


class Nested(nn.Module):
    """Has its buffer in a nested module; none of the modules has weights."""

    def __init__(self, width, length):
        super().__init__()
        self.inner = nn.ModuleList([nn.Sequential(Table(width, length))])

    def forward(self, x):
        return self.inner[0](x)


class Attention(nn.Module):
    def __init__(self, positions, width=8, length=2048):
        super().__init__()
        self.query, self.positions, self.out = nn.Linear(width, width), positions(width, length), nn.Linear(width, 2)

    def forward(self, x):
        self.angles = self.positions(x)
        return self.out(self.query(x) * torch.cos(self.angles).repeat(1, 2))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("positions", [Rotary, Table, Nested])
def test_position_buffers_are_exact_for_large_positions(positions, level, dtype):
    net, x = Attention(positions), torch.randn(1, 2048, 8)
    net(x)
    wanted = net.angles.clone()
    buffers = [buffer.clone() for buffer in net.buffers()]
    net, optimizer = initialized(net, level, dtype=dtype)
    backward(net(x).square().mean(), optimizer)
    optimizer.step()
    net(x)
    assert torch.equal(net.angles, wanted)
    assert net.angles.dtype is torch.float32
    amp.shutdown()
    assert all(map(torch.equal, buffers, net.buffers()))


class WithMask(nn.Module):
    """Has a mask as a buffer. Its weights are its own or those of a child, as in timm's Swin block."""

    def __init__(self, below):
        super().__init__()
        self.weights = nn.Linear(4, 12) if below else None
        self.weight = None if below else nn.Parameter(torch.eye(4))
        self.register_buffer("mask", torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -1e4))

    def forward(self, x):
        q, k, v = self.weights(x).chunk(3, -1) if self.weight is None else [x @ self.weight] * 3
        self.seen = self.mask.dtype
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("below", [True, False])
def test_mask_buffers_of_modules_with_weights_are_half_in_a_call(below, level, dtype):
    net = WithMask(below)
    wanted = net(torch.ones(2, 3, 4))
    net, _ = initialized(nn.Sequential(net), level, dtype=dtype)
    torch.testing.assert_close(net(torch.ones(2, 3, 4)), wanted, rtol=0.02, atol=0.02)
    assert net[0].seen is dtype


# Weights outside of the module tree


class Cell(nn.Module):
    """Also keeps its weights in a list."""

    def __init__(self, kind=list):
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.full((4, 8), 0.2)), nn.Parameter(torch.full((8, 4), 0.1))
        self.all_weights = [kind([self.w_in, self.w_out])]

    def forward(self, x):
        for w_in, w_out in self.all_weights:
            x = torch.tanh(x @ w_in) @ w_out
        return x


class TiedDecoder(nn.Module):
    """Its decoder has the encoder's weight in a structure that hides it from ``named_parameters``."""

    def __init__(self, hide):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Module()
        self.decoder.forward = self.decode
        vars(self.decoder)["hidden"] = hide(self.encoder.weight)

    def decode(self, x):
        hidden = vars(self.decoder)["hidden"]
        while not isinstance(hidden, torch.Tensor):
            hidden = next(iter(hidden.values() if isinstance(hidden, dict) else hidden))
        return nn.functional.linear(x, hidden.t())

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


BESIDE = {
    "list": Cell, "list of tuples": lambda: Cell(tuple), "tuple": lambda: TiedDecoder(lambda w: (w,)),
    "list of lists": lambda: TiedDecoder(lambda w: [[w]]), "dict": lambda: TiedDecoder(lambda w: {"weight": w}),
    "attribute": lambda: TiedDecoder(lambda w: w),
}  # fmt: skip


@pytest.mark.parametrize("kind", BESIDE)
def test_weights_outside_of_the_module_tree_are_refused_by_name_at_o2(kind):
    name, owner = {"list": ("all_weights", "Cell"), "list of tuples": ("all_weights", "Cell")}.get(
        kind, ("hidden", "Module")
    )
    net = BESIDE[kind]()
    with pytest.raises(AmpUsageError, match=rf"got one in '{name}' of {owner}, .*self\.weight = other\.weight"):
        initialized(net)
    assert not any(part._forward_pre_hooks for part in net.modules())


@pytest.mark.parametrize("kind", BESIDE)
@pytest.mark.parametrize("dtype", HALVES)
def test_weights_outside_of_the_module_tree_train_at_o3(kind, dtype):
    torch.manual_seed(0)
    net, ends = BESIDE[kind](), []
    for each, used in ((copy.deepcopy(net), "plain"), (net, "O3")):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        if used != "plain":
            each, optimizer = initialized(each, used, dtype=dtype)
        for x in torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            loss = (each(x) - x).square().mean()
            if used == "plain":
                loss.backward()
            else:
                backward(loss, optimizer)
            optimizer.step()
        ends.append(torch.cat([p.detach().float().flatten() for p in each.parameters()]))
    assert (ends[0] - ends[1]).norm() < 0.05


class Rebinds(nn.Module):
    """Assigns another value to its buffer in a call."""

    def __init__(self, value, first):
        super().__init__()
        self.weight, self.value = nn.Parameter(torch.eye(4)), value
        self.register_buffer("last", first)

    def forward(self, x):
        self.last = self.value
        return x @ self.weight


@pytest.mark.parametrize("first", [torch.zeros(3), None], ids=["a tensor", "nothing"])
@pytest.mark.parametrize("value", [
    None, torch.full((3,), 1 / 3), torch.arange(3),
], ids=["nothing", "float32", "integers"])  # fmt: skip
def test_a_buffer_that_a_call_replaces_keeps_its_new_dtype(value, first, level):
    net, _ = initialized(nn.Sequential(Rebinds(value, first)), level)
    for _ in range(3):
        net(torch.ones(2, 4))
        assert net[0].last is value
    amp.shutdown()
    assert net[0].last is value


# Inputs and outputs


class Normalize(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.scale = nn.Parameter(torch.tensor(1000.0)), nn.Parameter(torch.tensor(5.0))

    def forward(self, x):
        self.given = x
        return (x - self.mean) / self.scale


class Wrapped(nn.Module):
    """Passes its input to the kept module through another module, or in a structure."""

    def __init__(self, norm, how):
        super().__init__()
        self.norm, self.how, self.body = norm, how, nn.Linear(4, 4)
        nn.init.eye_(self.body.weight)
        nn.init.zeros_(self.body.bias)

    def forward(self, batch):
        x = batch["x"] if isinstance(batch, dict) else batch
        return self.body(self.norm(x if self.how != "computed" else x + 0))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("how", ["plain", "dict", "keyword", "sequence", "computed"])
def test_a_kept_module_gets_its_input_unrounded(how, level, dtype):
    norm, x = Normalize(), 1000 + 5 * torch.randn(64, 4)
    net = Wrapped(nn.Sequential(nn.Identity(), norm) if how == "sequence" else norm, how)
    net, _ = initialized(net, level, dtype=dtype, keep_fp32_modules=[Normalize])
    out = net({"x": x}) if how == "dict" else net(batch=x) if how == "keyword" else net(x)
    exact = x if how != "computed" else x.to(dtype).float()  # the network computed it
    assert torch.equal(norm.given, exact)
    torch.testing.assert_close(out, (exact - 1000) / 5, rtol=0.01, atol=0.01)


def test_the_output_of_a_kept_module_is_not_rounded(level):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return {"out": [self.head(self.body(x))], "body": self.body(x)}

    net, _ = initialized(Net(), level, keep_fp32_modules=["head"])
    seen = []
    net.head.register_forward_hook(lambda module, args, output: seen.append(output), prepend=True)
    out = net(torch.randn(3, 4))
    assert torch.equal(out["out"][0], seen[0])
    assert not torch.equal(seen[0], seen[0].bfloat16().float())
    assert torch.equal(out["body"], out["body"].bfloat16().float())
    backward(out["out"][0].sum(), _)
    assert net.body.weight.grad is not None


@pytest.mark.parametrize("asked", [None, torch.float32])
def test_float64_outputs_stay_float64_unless_a_dtype_is_requested(asked, level):
    class Net(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out, out.double().cumsum(0), torch.arange(3)

    net, _ = initialized(Net(4, 4), level, cast_model_outputs=asked)
    dtypes = [out.dtype for out in net(torch.ones(2, 4))]
    assert dtypes == [torch.float32, torch.float32 if asked else torch.float64, torch.int64]


# Losses within a network


class WithLoss(nn.Module):
    def __init__(self, criterion, structure=lambda loss, out: {"loss": loss, "logits": out}):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.criterion, self.structure = criterion, structure

    def forward(self, ids):
        logits = self.head(self.words(ids))
        return self.structure(self.criterion(logits, (ids + 1) % 64), logits)


def loss_of(out):
    return out["loss"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("criterion", [
    nn.CrossEntropyLoss, lambda: nn.CrossEntropyLoss(weight=torch.linspace(0.1, 2.0, 64)), nn.MultiMarginLoss,
])  # fmt: skip
def test_a_loss_module_in_a_network_computes_in_float32(criterion, level):
    ids, net = torch.arange(64), WithLoss(criterion())
    net, optimizer = initialized(net, level)
    out = net(ids)
    wanted = criterion()(out["logits"], (ids + 1) % 64)
    assert torch.equal(out["loss"], wanted)
    backward(out["loss"], optimizer)


STRUCTURES = {
    "dict": lambda loss, out: {"loss": loss, "logits": out},
    "tuple": lambda loss, out: (loss, out),
    "alone": lambda loss, out: loss,
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_network_that_computes_its_loss_in_half_warns_once(structure, level, dtype):
    net = WithLoss(lambda *args: nn.functional.cross_entropy(*args), STRUCTURES[structure])
    net, optimizer = initialized(net, level, dtype=dtype)
    with pytest.warns(TurboWarning, match=r"WithLoss returns a scalar.*outside the network.*keep_fp32_modules"):
        loss = loss_of(net(torch.arange(64)))
    backward(loss, optimizer)
    with torch.no_grad():
        net(torch.arange(64))  # warnings are errors here


# Half weights that do not train


@pytest.mark.parametrize("frozen", HALVES)
@pytest.mark.parametrize("used", ["O0", "O1", "O2", "O3"])
def test_a_frozen_half_encoder_is_not_changed(used, frozen):
    class Diffusion(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).to(frozen).requires_grad_(False)
            self.encoder.eval()
            self.net = nn.Linear(8, 1)
            self.register_buffer("scale", torch.ones((), dtype=frozen))

        def latent(self, x):
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                return self.encoder(x.to(frozen)) * self.scale

    net = Diffusion()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    wanted = net.latent(torch.ones(3, 4))
    optimizer = sgd(net.net)
    amp.initialize(net, optimizer, opt_level=used, dtype=torch.bfloat16, verbosity=0)
    assert torch.equal(net.latent(torch.ones(3, 4)), wanted)
    for _ in range(2):
        backward((net.net(net.latent(torch.ones(3, 4)).float()).float() - 1).square().mean(), optimizer)
        optimizer.step()
    frozen_names = [name for name in before if name.startswith(("encoder", "scale"))]
    for _ in range(2):  # during the run, and after it
        state = net.state_dict()
        for name in frozen_names:
            assert torch.equal(state[name], before[name])
            assert state[name].dtype is before[name].dtype
        assert state["net.weight"].dtype is torch.float32
        amp.shutdown()


def test_half_weights_that_train_are_refused():
    net = nn.Sequential(nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4).half())
    with pytest.raises(AmpUsageError, match=r"got torch.float16 in '1\.weight'.*requires_grad_\(False\)"):
        amp.initialize(net, opt_level="O2", verbosity=0)
