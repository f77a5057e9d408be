"""The table of networks of other packages: one row of it, and what it tells."""

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


def test_a_row_has_each_level_and_names_what_was_told(tmp_path, monkeypatch, capsys):
    case = Network("torch", Halving, lambda: torch.randn(8, 4), lambda net, batch: net(batch).float())
    monkeypatch.setattr(networks, "NETWORKS", {"halving": case, "absent": case._replace(package="no_such_package")})
    assert main(["--out", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    assert "Not installed: absent." in page
    (row,) = (line for line in page.splitlines() if "`halving`" in line)
    assert row.count("|") == 9
    assert "O2: Halving warned; O3: Halving warned" in row
    assert row.strip("| ") in " ".join(capsys.readouterr().out.splitlines())
    for cell in row.split("|")[4:8]:
        assert 90 < float(cell) < 110
