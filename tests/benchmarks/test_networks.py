"""The table of networks of other packages: one row of it."""

import torch
from torch import nn

from benchmarks import networks
from benchmarks.networks import Network, main


class Halving(nn.Module):
    """Returns a loss that it computes itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return (self.layer(x) - 1).square().mean()


def test_a_row_has_the_loss_of_each_level(tmp_path, monkeypatch):
    case = Network("torch", Halving, lambda: torch.randn(8, 4), lambda net, batch: net(batch).float())
    monkeypatch.setattr(networks, "NETWORKS", {"halving": case, "absent": case._replace(package="no_such_package")})
    assert main(["--out", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    (row,) = (line for line in page.splitlines() if "`halving`" in line)
    for cell in row.split("|")[4:8]:
        assert 90 < float(cell) < 110
