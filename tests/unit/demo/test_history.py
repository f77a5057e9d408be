"""What is recorded of a level, and how bytes are counted."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_turbo.demo.history import RunHistory, past_history, training_bytes
from lightning_turbo.demo.settings import DemoError
from lightning_turbo.plugins.apex_amp import ApexAMP


def test_bytes_of_a_plain_model():
    model = nn.Linear(10, 4)  # 44 weights of 4 bytes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert training_bytes(model.parameters(), [optimizer]) == {"weights": 176, "gradients": 0, "optimizer_state": 0}
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    assert training_bytes(model.parameters(), [optimizer]) == {"weights": 176, "gradients": 176, "optimizer_state": 176}


def test_bytes_of_masters_count_as_weights_and_shared_storage_counts_once():
    half = nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))
    master = nn.Parameter(torch.zeros(100))
    master.grad = torch.zeros(100)
    optimizer = torch.optim.SGD([master], lr=0.1)
    found = training_bytes([half, half, half.detach()], [optimizer])
    assert found == {"weights": 600, "gradients": 400, "optimizer_state": 0}


def test_the_first_epoch_is_left_out_of_the_median():
    history = RunHistory(samples=100)
    assert history.seconds_per_epoch is history.samples_per_second is None
    history.epoch_seconds = [9.0]
    assert history.seconds_per_epoch == 9.0
    history.epoch_seconds = [9.0, 2.0, 4.0, 3.0]
    assert history.seconds_per_epoch == 3.0
    assert history.samples_per_second == pytest.approx(100 / 3)


def test_state_is_plain_and_comes_back(tmp_path):
    history = RunHistory(samples=3)
    history.epoch_seconds, history.step_losses = [1.5], [0.5, 0.25]
    history.bytes, history.skipped_steps, history.half_dtype = {"weights": 4}, 7, "bfloat16"
    history.log = lambda *_: None  # Lightning hangs such things on callbacks
    path = tmp_path / "O1.ckpt"
    torch.save({"callbacks": {"RunHistory": history.state_dict()}}, path)
    again = RunHistory(samples=3)
    again.load_state_dict(past_history(path))
    assert again.state_dict() == history.state_dict()
    again.epoch_seconds.append(2.0)
    assert history.epoch_seconds == [1.5]
    again._pending = [torch.ones(())]
    metrics = {"val_loss": 0.5, "val_accuracy": 0.9}
    trainer = SimpleNamespace(callback_metrics=metrics, precision_plugin=ApexAMP("O1"))
    again.on_train_epoch_end(trainer, SimpleNamespace(device=torch.device("cpu")))
    assert again.skipped_steps == 7  # those of the run before are counted


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_an_unreadable_checkpoint_is_refused(tmp_path, content):
    path = tmp_path / "O2.ckpt"
    path.write_bytes(content) if content is not None else torch.save({"state_dict": {}}, path)
    with pytest.raises(DemoError, match=r"O2\.ckpt', which cannot be read .*Delete it to train its level again"):
        past_history(path)
