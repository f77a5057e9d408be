"""The networks that the suites share."""

import pytest
import torch

from benchmarks.work import resnet50


@pytest.mark.parametrize(
    ("dims", "shape", "options"),
    [(2, (3, 32, 32), {"n_input_channels": 3, "conv1_t_stride": 2}), (3, (1, 8, 8, 8), {"n_input_channels": 1})],
)
def test_resnet_50_is_that_of_monai(dims, shape, options):
    build = pytest.importorskip("monai.networks.nets").resnet50
    other = build(spatial_dims=dims, num_classes=5, bias_downsample=False, **options).eval()
    net = resnet50(dims, 5).eval()
    net.load_state_dict(dict(zip(net.state_dict(), other.state_dict().values(), strict=True)))
    x = torch.randn(2, *shape)
    with torch.no_grad():
        assert torch.equal(net(x), other(x))
