"""A network compiled in place: the same results and names, each block compiled once, and nothing left afterwards."""

import dataclasses
import re
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import CompilationMetrics

from lightning_turbo.nn.compile import CompileReport, compile_counts, compiled_in_place, repeated_blocks

# Deprecated attributes that torch reads while it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x))) + x


class Prints(nn.Linear):
    def forward(self, x):
        print("between two graphs")
        return super().forward(x)


def model(*parts):
    holder = nn.Module()
    for number, part in enumerate(parts):
        holder.add_module(f"part{number}", part)
    return holder


@pytest.fixture
def backend():
    """A backend that counts its graphs and runs them unchanged."""
    torch._dynamo.reset()

    def count(graph, inputs):
        count.graphs += 1
        return graph.forward

    count.graphs = 0
    yield count
    torch._dynamo.reset()


@pytest.mark.parametrize("make", [
    lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Block,
    lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
], ids=["linear", "sequential", "own class", "transformer"])  # fmt: skip
def test_a_compiled_network_is_one_graph_with_the_same_results_and_names(make, backend):
    part, x = make(), torch.randn(3, 2, 4)
    holder = model(part)
    names, expected = list(holder.state_dict()), part(x)
    with compiled_in_place(holder, {"backend": backend}) as compiled:
        assert compiled == [part]
        assert list(holder.state_dict()) == names
        out = part(x)
        out.sum().backward()
    assert torch.equal(out, expected)
    assert backend.graphs == 1
    assert all(p.grad is not None for p in part.parameters())
    part(x)
    assert backend.graphs == 1  # compilation is removed
    assert part._compiled_call_impl is None


def test_networks_in_a_module_list_are_compiled_separately(backend):
    inner = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    holder = model(nn.ModuleList([inner[0], nn.ModuleDict({"a": inner[1]}), nn.ReLU()]), inner[2])
    with compiled_in_place(holder, {"backend": backend}) as compiled:
        assert compiled == inner


def test_compile_counts_are_zero_before_any_compilation(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    assert compile_counts() == CompileReport(0, {}, {})
    assert "torch._dynamo.utils" not in sys.modules  # it takes a second


def test_repeated_blocks_are_compiled_once(backend):
    network = nn.Sequential(nn.Linear(4, 4), *(Block() for _ in range(12)), nn.Linear(4, 2))
    holder, x = model(network), torch.randn(3, 4)
    assert repeated_blocks(holder) == list(network[1:-1])
    expected = network(x)
    with compiled_in_place(holder, {"what": "blocks", "backend": backend}):
        assert torch.equal(network(x), expected)
    assert backend.graphs == 1


def test_recompiles_and_graph_breaks_are_reported_with_line_and_reason(backend, capsys):
    said, network = [], Prints(4, 4)
    with compiled_in_place(model(network), {"backend": backend, "dynamic": False}, said.append):
        for rows in (3, 5, 5):
            network(torch.randn(rows, 4))
    (text,) = said
    assert text.startswith("compile='network': 2 graphs, ")
    has_reason = "recompile_reason" in {field.name for field in dataclasses.fields(CompilationMetrics)}
    assert ("size mismatch at index 0. expected 3, actual 5" if has_reason else "torch gives no reason") in text
    line = Prints.forward.__code__.co_firstlineno + 1
    assert re.search(rf"{re.escape(__file__)}:{line}: (Failed to trace )?builtin", text)


def test_compilation_is_removed_after_an_error_and_other_compiled_modules_stay(backend):
    mine, theirs = nn.Linear(4, 4), Block()
    theirs.compile(backend="eager")
    before = theirs._compiled_call_impl

    def fail():
        with compiled_in_place(model(mine, theirs), {"backend": backend}) as compiled:
            assert compiled == [mine]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert mine._compiled_call_impl is None
    assert theirs._compiled_call_impl is before


@pytest.mark.parametrize(("how", "parts", "text"), [
    ("network", [nn.ReLU()], "expected a child with parameters, got none in Module"),
    ("blocks", [Block()], "expected two blocks of one class, got none in Module"),
])  # fmt: skip
def test_a_model_without_modules_to_compile_is_an_error(how, parts, text):
    with pytest.raises(ValueError, match=text), compiled_in_place(model(*parts), how):
        pass
