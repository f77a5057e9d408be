"""merge_param_groups: fewer groups, the same weights bit for bit, and older checkpoints."""

import copy

import pytest
import torch
from torch import nn

from lightning_turbo.optim import merge_param_groups

DEPTH = 4


def network():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(DEPTH)]
    return nn.Sequential(*layers, nn.Linear(6, 2))


def decayed(net, **options):
    """Return one group per parameter: the learning rate decays by layer, and norms and biases have no weight decay."""
    return [
        {
            "params": [p],
            "lr": 0.01 * 0.5 ** (DEPTH - int(name[0])),
            "weight_decay": 0.1 if p.ndim > 1 else 0.0,
            **options,
        }
        for name, p in net.named_parameters()
    ]


def train(net, optimizer, schedule=None, steps=5):
    for step in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        if step % 2:
            net[-1].bias.grad = None  # in some steps a parameter has no gradient
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return [p.detach().clone() for p in net.parameters()]


KINDS = [
    *(getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam")),
    *(getattr(torch.optim, name) for name in ("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")),
]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_merged_param_groups_give_the_same_weights_bit_for_bit(kind, options):
    if "fused" in options and kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return
    groups = {}
    for name, merge in (("as they are", list), ("merged", merge_param_groups)):
        net = network()
        made = [
            {k: v for k, v in group.items() if kind is not torch.optim.Rprop or k != "weight_decay"}
            for group in decayed(net)
        ]
        optimizer = kind(merge(made), **options)
        # A LambdaLR has one function for all groups.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        groups[name] = len(optimizer.param_groups), train(net, optimizer, schedule)
    assert groups["as they are"][0] == 4 * DEPTH + 2
    assert groups["merged"][0] == (DEPTH + 1 if kind is torch.optim.Rprop else 2 * (DEPTH + 1))
    assert all(map(torch.equal, groups["as they are"][1], groups["merged"][1]))


def test_merged_param_groups_keep_their_order_names_and_arguments():
    net = network()
    first, second, third = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups = [
        {"params": first, "lr": 1, "name": "a", "param_names": ["x"]},
        {"params": iter([second]), "lr": 0.5, "name": "b", "param_names": ["y"]},
        {"params": (third,), "lr": 1.0, "name": "c", "param_names": ["z"]},
    ]
    given = copy.copy(groups[0])
    merged = merge_param_groups(iter(groups))
    assert [group["lr"] for group in merged] == [1, 0.5]
    assert [group["name"] for group in merged] == ["a", "b"]
    assert [group["param_names"] for group in merged] == [["x", "z"], ["y"]]
    assert [each is given for each, given in zip(merged[0]["params"], (first, third), strict=True)] == [True, True]
    assert groups[0].keys() == given.keys()
    assert all(groups[0][key] is given[key] for key in given)
    assert merge_param_groups(groups[:1])[0]["params"] == [first]
    assert len(merge_param_groups([{"params": net.parameters()}])[0]["params"]) == 4 * DEPTH + 2


@pytest.mark.parametrize(("one", "two", "equal"), [
    (0, 0.0, True), ((0.9, 0.99), (0.9, 0.99), True), ([1, 2], [1, 2], True), (None, None, True), ("x", "x", True),
    (1, True, False), ((0.9, 0.99), [0.9, 0.99], False), (0.1, 0.2, False), (None, 0, False), ("1", 1, False),
    (torch.tensor(0.1), torch.tensor(0.1), False), ((0.9, torch.tensor(0.9)), (0.9, torch.tensor(0.9)), False),
    (float("nan"), float("nan"), False), ({"a": 1}, {"a": 1}, False),
])  # fmt: skip
def test_which_param_groups_are_equal(one, two, equal):
    groups = [{"params": torch.ones(1), "option": value} for value in (one, two)]
    assert len(merge_param_groups(groups)) == (1 if equal else 2)
    same = torch.tensor(0.1)
    assert len(merge_param_groups([{"params": torch.ones(1), "lr": same} for _ in range(2)])) == 1


def test_param_groups_with_missing_options_or_named_parameters_are_not_merged():
    assert len(merge_param_groups([{"params": torch.ones(1)}, {"params": torch.ones(1), "lr": 0.1}])) == 2
    named = [
        {"params": [("weight", torch.ones(1))]},
        {"params": [torch.ones(1)]},
        {"params": [("bias", torch.ones(1))]},
    ]
    assert [len(group["params"]) for group in merge_param_groups(named)] == [2, 1]
    assert merge_param_groups([]) == []


def test_param_groups_that_cannot_be_merged_are_refused():
    weight = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(TypeError, match="groups: expected dictionaries with 'params', got"):
        merge_param_groups([weight])
    with pytest.raises(TypeError, match="expected dictionaries with 'params'"):
        merge_param_groups([{"lr": 0.1}])
    with pytest.raises(ValueError, match=r"expected each parameter once, got 'one of shape \(2, 3\) twice'"):
        merge_param_groups([{"params": [weight]}, {"params": [("w", weight)]}])


def test_the_state_of_an_older_checkpoint_is_converted_to_merged_param_groups():
    """Three steps with many groups and two with merged ones equal five with many groups."""
    whole, net = network(), network()
    expected = train(whole, torch.optim.AdamW(decayed(whole)))
    before = torch.optim.AdamW(decayed(net))
    train(net, before, steps=3)
    saved, weights = copy.deepcopy(before.state_dict()), copy.deepcopy(net.state_dict())

    resumed = network()
    resumed.load_state_dict(weights)
    groups = decayed(resumed)
    old = torch.optim.AdamW(groups)
    old.load_state_dict(saved)
    new = torch.optim.AdamW(merge_param_groups(groups))
    new.state.update(old.state)
    with pytest.raises(ValueError, match="parameter group"):
        new.load_state_dict(saved)
    for step in (3, 4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        new.zero_grad()
        resumed(x).square().mean().backward()
        if step % 2:
            resumed[-1].bias.grad = None
        new.step()
    assert all(map(torch.equal, expected, resumed.parameters()))
