"""What the host hears of a loss scale that lives on the device."""

import pytest
import torch

from lightning_turbo.amp.loss_scaling import HEARD_LATE, LossScaler

pytestmark = pytest.mark.gpu


def test_every_rank_hears_of_skips_at_the_same_pass():
    scaler = LossScaler("dynamic")
    heard = []
    for number in range(30):
        gradient = torch.full((8,), float("inf") if number >= 10 else 1.0, device="cuda")
        scaler.unscale_([gradient])
        scaler.update()
        heard.append(scaler.recent_skips_in_a_row)
    late = HEARD_LATE - 1
    assert heard == [max(0, number - late - 9) for number in range(30)]
    assert scaler.skipped_steps == 20
