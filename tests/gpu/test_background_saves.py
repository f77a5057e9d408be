"""Background saves on a CUDA device: contents of the file and memory of the device."""

import pytest
import torch

from lightning_turbo import AtomicCheckpointIO

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(170)]

DEVICE = "cuda:0"
EPOCH = {"epoch_progress": {"current": {"ready": 1, "completed": 0}}}
IN_EPOCH = {"loops": {"fit_loop": {**EPOCH, "epoch_loop.batch_progress": {"total": {"ready": 1}}}}}


def test_the_steps_after_a_save_are_not_in_it_and_it_takes_no_memory_of_the_device(tmp_path):
    io = AtomicCheckpointIO(background=True)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)), torch.nn.BatchNorm1d(256)).to(DEVICE)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    batch = torch.rand(64, 256, device=DEVICE)

    def step():
        optimizer.zero_grad()
        net(batch).square().sum().backward()
        optimizer.step()

    step()
    places = set()
    for number in range(4):
        torch.cuda.synchronize()
        # Tensors are cloned on the device, in stream order.
        expected = {name: value.clone() for name, value in net.state_dict().items()}
        moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        io.save_checkpoint(
            {**IN_EPOCH, "net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{number}.ckpt"
        )
        assert torch.cuda.max_memory_allocated() == before
        for _ in range(3):
            step()
        loaded = io.load_checkpoint(tmp_path / f"{number}.ckpt")
        for name, value in expected.items():
            assert loaded["net"][name].device.type == "cpu"
            assert torch.equal(loaded["net"][name].to(DEVICE), value), name
        for state, moment in zip(loaded["optimizer"]["state"].values(), moments, strict=True):
            assert torch.equal(state["exp_avg"].to(DEVICE), moment)
        places.add(frozenset(each.data_ptr() for kept in io._copier._buffers.values() for each in kept))
    assert len(places) == 1, "the memory for copies is kept"
    io.teardown()
