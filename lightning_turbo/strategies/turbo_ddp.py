"""``Trainer(strategy="turbo_ddp")``: Lightning's DDP plus the techniques around the step."""

from __future__ import annotations

import sys
from typing import Any

from lightning_turbo._checks import check_switches
from lightning_turbo._lightning import DDPStrategy, MisconfigurationException
from lightning_turbo.callbacks.preemption import attach_preemption
from lightning_turbo.strategies.lean_loop import LeanStrategy
from lightning_turbo.strategies.turbo import TurboParts

__all__ = ["TurboDDPStrategy"]


class TurboDDPStrategy(TurboParts, DDPStrategy, LeanStrategy):
    """Lightning's DDP plus the techniques around the step: ``strategy="turbo_ddp"``.

    It has all parts of ``TurboStrategy`` and those below. Start it with torchrun or Lightning's launcher, like
    ``"ddp"``. Every rank needs the same settings; torch's DDP only checks the parameters.

    On SIGTERM to any rank, all ranks save and end after the same step, and in a Slurm job that Lightning requeues they
    save and requeue it together; see ``Preemption``, which this strategy adds if there is none. Lightning's own
    broadcast, for which the host waits in every batch, is left out.

    Args:
        *args: As in Lightning's ``DDPStrategy``.
        gradient_as_bucket_view: Whether to keep gradients in DDP's buckets, which saves a copy.
        preemption: Whether to add ``Preemption(signals=("SIGTERM",))``.
        **kwargs: As in ``TurboStrategy``, Lightning's ``DDPStrategy`` and torch's ``DistributedDataParallel``. To send
            half the bytes, rounded, pass ``ddp_comm_hook=default_hooks.bf16_compress_hook`` from
            ``torch.distributed.algorithms.ddp_comm_hooks`` (Lightning uses it on CUDA only).

    Raises:
        ValueError: If ``compile`` has none of its values.
        TypeError: If a switch is not a bool.
        LightningMismatchError: If ``lean`` is ``True`` and the loop of this version of Lightning was not compared.
        MisconfigurationException: In a worker of Ray Train, which needs ``lightning_turbo.ray.RayTurboDDPStrategy``.

    Example:
        >>> from lightning_turbo.strategies import TurboDDPStrategy
        >>> TurboDDPStrategy(compile="blocks").compile
        'blocks'
    """

    strategy_name = "turbo_ddp"
    _signals = ("SIGTERM",)

    def __init__(
        self,
        *args: Any,
        gradient_as_bucket_view: bool = True,
        preemption: bool = True,
        **kwargs: Any,
    ) -> None:
        _refuse_under_ray(type(self))
        check_switches(preemption=preemption)
        super().__init__(*args, gradient_as_bucket_view=gradient_as_bucket_view, **kwargs)
        self.preemption = preemption

    def setup_environment(self) -> None:
        """Set up the device and the ranks, and add ``ExactResume`` and ``Preemption`` to the Trainer."""
        super().setup_environment()
        if self.preemption:
            attach_preemption(self.lightning_module.trainer, self._signals)  # pyright: ignore[reportOptionalMemberAccess]


def _refuse_under_ray(strategy: type) -> None:
    """Raise an error in a worker of Ray Train, unless the ranks and devices of a strategy are Ray's."""
    # Looked up by name, because a worker has imported it, and other programs need no Ray.
    train: Any = sys.modules.get("ray.train.v2.api.train_fn_utils")
    if train is None or any(base.__name__ == "RayDDPStrategy" for base in strategy.__mro__):
        return
    try:
        train.get_context()
    except (RuntimeError, DeprecationWarning):  # outside of a worker, and within Ray Tune
        return
    raise MisconfigurationException(
        f"{strategy.__name__} in a worker of Ray Train: expected a strategy whose ranks and device are Ray's. Write "
        "prepare_trainer(Trainer(strategy=RayTurboDDPStrategy(), plugins=[RayLightningEnvironment()], devices='auto')) "
        "with: from lightning_turbo.ray import RayTurboDDPStrategy; from ray.train.lightning import prepare_trainer, "
        "RayLightningEnvironment."
    )
