"""Diffs for the user's source: right, minimal, and never written to the file."""

import linecache
import textwrap

import pytest

from lightning_turbo.doctor.facts import Site
from lightning_turbo.doctor.patches import diff_for

CASES = [
    ("host-sync", 'self.log("a", loss.item(), prog_bar=True)', 'self.log("a", loss, prog_bar=True)'),
    ("host-sync", 'self.log("a", float(loss))', 'self.log("a", loss)'),
    ("host-sync", 'self.log_dict({"a": loss.item()})', 'self.log_dict({"a": loss})'),
    ("array-copy", "x = torch.tensor(x, dtype=t)", "x = torch.as_tensor(x, dtype=t)"),
    ("made-on-host", "w = torch.zeros(3, 4).to(x.device)", "w = torch.zeros(3, 4, device=x.device)"),
    ("made-on-host", "w = torch.zeros(3).cuda()", 'w = torch.zeros(3, device="cuda")'),
    ("retain-graph", "loss.backward(retain_graph=True)", "loss.backward()"),
    ("gradients-kept", "optimizer.zero_grad(set_to_none=False)", "optimizer.zero_grad()"),
    ("retained-graph", "self.losses.append(loss)", "self.losses.append(loss.detach())"),
    ("retained-graph", "self.losses.append(a + b)", "self.losses.append((a + b).detach())"),
    ("retained-graph", "self.total += loss", "self.total += loss.detach()"),
    ("retained-graph", "self.last = 0.9 * loss", "self.last = (0.9 * loss).detach()"),
    ("bias-before-norm", "self.c = nn.Conv2d(1, 4, 3)", "self.c = nn.Conv2d(1, 4, 3, bias=False)"),
    ("bias-before-norm", "self.c = nn.Linear(1, 4, bias=True)", "self.c = nn.Linear(1, 4, bias=False)"),
    ("housekeeping", "gc.collect()", None),
    ("housekeeping", "torch.cuda.empty_cache()", None),
]


def write(path, statement):
    path.write_text(f"def f(self, x):\n    before = 'ä'\n    {statement}\n    return before\n", encoding="utf-8")
    linecache.checkcache(str(path))
    return Site(file=str(path), line=3)


@pytest.mark.parametrize(("rule", "line", "better"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_a_line_is_mended_in_a_diff(rule, line, better, tmp_path):
    path = tmp_path / "train.py"
    site = write(path, line)
    before = path.read_bytes()
    expected = ["--- train.py", "+++ train.py", f"-    {line}", *([f"+    {better}"] if better else [])]
    changed = [row for row in diff_for(rule, site).splitlines() if row.startswith(("+", "-"))]
    assert changed == expected
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("host-sync", "value = loss.item()"),
        ("array-copy", "x = torch.tensor(x, requires_grad=True)"),
        ("made-on-host", "w = noise.to(x.device)"),
        ("housekeeping", "value = gc.collect()"),
        ("retained-graph", "self.outputs.append({'loss': loss})"),
        ("data-parallel", "self.net = nn.DataParallel(net)"),
        ("retained-graph", "y, self.hidden = self.lstm(x, self.hidden)"),
        ("retained-graph", "self.last = (loss, y)"),
        ("retained-graph", "self.last = {'loss': loss}"),
        ("bias-before-norm", "self.c = nn.Linear(1, 4, True)"),
        ("bias-before-norm", "self.c = nn.Conv2d(1, 4, 3, 1, 1, 1, 1, True)"),
        ("bias-before-norm", "self.c = nn.Linear(*sizes)"),
        ("made-on-host", "w = torch.stack([a, b]).to(x.device)"),
        ("made-on-host", "w = torch.zeros(3).to(x)"),
        ("made-on-host", "w = torch.zeros(3).to(x.device, torch.float32)"),
        ("host-sync", "self.log('p', np.exp(loss.item()))"),
    ],
)
def test_no_change_is_proposed_where_none_is_simple(rule, line, tmp_path):
    assert diff_for(rule, write(tmp_path / "train.py", line)) == ""


@pytest.mark.parametrize(
    ("line", "better"), [("if x: gc.collect()", "if x: pass"), ("y = 1; gc.collect()", "y = 1; pass")]
)
def test_a_statement_that_cannot_be_spared_becomes_pass(line, better, tmp_path):
    assert f"+    {better}" in diff_for("housekeeping", write(tmp_path / "train.py", line)).splitlines()


def test_a_call_over_several_lines_is_mended(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent(
            """
            class Net:
                def __init__(self):
                    self.net = Sequential(
                        nn.Conv2d(
                            1, 4,
                            kernel_size=3,
                        ),
                        nn.BatchNorm2d(4),
                    )
            """
        )
    )
    linecache.checkcache(str(path))
    diff = diff_for("bias-before-norm", Site(file=str(path), line=5))
    assert "+            nn.Conv2d(1, 4, kernel_size=3, bias=False)," in diff


def test_a_file_that_is_gone_or_broken_gives_no_diff(tmp_path):
    assert diff_for("housekeeping", Site(file=str(tmp_path / "gone.py"), line=1)) == ""
    path = tmp_path / "broken.py"
    path.write_text("def f(:\n")
    assert diff_for("housekeeping", Site(file=str(path), line=1)) == ""


def test_the_layer_on_the_line_is_the_one_that_changes(tmp_path):
    path = tmp_path / "net.py"
    rows = [
        "net = nn.Sequential(",
        "    nn.Conv2d(1, 4, 3), nn.ReLU(),",
        "    nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8),",
        ")",
    ]
    path.write_text("\n".join(rows) + "\n")
    diff = diff_for("bias-before-norm", Site(file=str(path), line=3))
    assert "+    nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8)," in diff.splitlines()
    assert "bias=False" not in diff.partition("@@")[2].splitlines()[1]


@pytest.mark.parametrize(
    ("line", "better"),
    [
        ("net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8))", None),
        (
            "net = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(4, 8, 3))",
            "net = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(4, 8, 3, bias=False))",
        ),
    ],
)
def test_of_two_layers_on_a_line_none_is_guessed(line, better, tmp_path):
    diff = diff_for("bias-before-norm", write(tmp_path / "train.py", line))
    assert [row[5:] for row in diff.splitlines() if row.startswith("+ ")] == ([better] if better else [])
