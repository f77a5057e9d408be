"""Where the names of ``apex.parallel`` are now: torch has them itself."""

from __future__ import annotations

from lightning_turbo._checks import refuse_name

__all__: list[str] = []

_INSTEAD = {
    "DistributedDataParallel": (
        "torch.nn.parallel.DistributedDataParallel without delay_allreduce and message_size, or Trainer(strategy='ddp')"
    ),
    "Reducer": "torch.nn.parallel.DistributedDataParallel with no_sync()",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm, or Trainer(sync_batchnorm=True)",
    "convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm, or Trainer(sync_batchnorm=True)",
    "LARC": "lightning_turbo.lars",
}


def __getattr__(name: str) -> object:
    raise refuse_name("apex.parallel", name, _INSTEAD)
