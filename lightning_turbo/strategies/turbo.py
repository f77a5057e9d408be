"""``Trainer(strategy="turbo")`` and ``strategy="turbo_ddp"``: Lightning's strategies with every part at once."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_turbo._checks import check_switches
from lightning_turbo._lightning import (
    CheckpointIO,
    DDPStrategy,
    MisconfigurationException,
    Precision,
    SingleDeviceStrategy,
    Strategy,
    check_binding,
    is_fitting,
    rank_zero_info,
)
from lightning_turbo._loops import count_as_one_run
from lightning_turbo.plugins.checkpoint_io import AmpCheckpointIO
from lightning_turbo.strategies.agreement import check_agreement
from lightning_turbo.strategies.lean import LeanStrategy
from lightning_turbo.strategies.parts import MatmulPrecision, TurboParts
from lightning_turbo.strategies.rank_states import keep_states_of_ranks, take_states_of_rank
from lightning_turbo.strategies.restart import accumulate_as_scheduled, set_up_again, set_up_loader

__all__ = ["TurboDDPStrategy", "TurboStrategy"]

Compression = Literal["bf16", "fp16"]
_COMPRESS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


class _TurboStrategy(Strategy):
    """What both strategies do alike; stands in front of Lightning's."""

    parts: TurboParts

    @property
    def prefetches_to_device(self) -> bool:
        """Whether this strategy keeps batches on the device itself, so that a datamodule need not."""
        return self.parts.device_prefetch

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes checkpoints; the one that was given is wrapped in ``AmpCheckpointIO``."""
        if self._checkpoint_io is None:  # made when it is needed: the Trainer refuses a second one beside it
            self._checkpoint_io = AmpCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io if io is None or isinstance(io, AmpCheckpointIO) else AmpCheckpointIO(io)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Take up the optimizers' states; with all else restored, so do training loaders that are set up already."""
        super().load_optimizer_state_dict(checkpoint)
        set_up_again(self.lightning_module)

    def on_train_start(self) -> None:
        """Go on from a checkpoint with the epoch counted, and the batches accumulated, as if nothing had happened."""
        module: Any = self.lightning_module
        count_as_one_run(module.trainer)
        accumulate_as_scheduled(module)

    def process_dataloader(self, dataloader: object) -> object:
        """Keep the next batches on the device, and begin with the epoch that the run goes on with."""
        loader = self.parts.loader(self, super().process_dataloader(dataloader))
        return set_up_loader(self.lightning_module, loader)

    def teardown(self) -> None:
        """Give everything back."""
        self.parts.give_back()
        super().teardown()


class TurboStrategy(_TurboStrategy, SingleDeviceStrategy, LeanStrategy):
    """Lightning's strategy for one device with the techniques around the step switched on: ``strategy="turbo"``.

    | Part | Default | What it does; off is exactly Lightning's behaviour |
    |---|---|---|
    | ``device_prefetch`` | ``True`` | keeps the next batches on the CUDA device, after Lightning's sampler |
    | ``memory_format`` | ``None`` | channels last for 2D and 3D, or what a measurement finds faster |
    | ``cudnn_benchmark`` | ``True`` | on CUDA, for the run; gives way to determinism; put back afterwards |
    | ``matmul_precision`` | ``None`` | ``"high"`` allows TF32 on CUDA, for the run; put back afterwards |
    | ``release_gradients`` | ``True`` | gradients to None right after the step |
    | ``lean_step`` | ``False`` | Lightning's loop with direct calls of its hooks; same order, same results |
    | ``lean_logging`` | ``False`` | a logged value stays where it is until somebody reads it |
    | checkpoint IO | always | reads the scaler state of old checkpoints |

    A part that has no meaning on the device is named once in the log.

    Args:
        device: The device; by default the one that the Trainer chose.
        accelerator: As in Lightning.
        checkpoint_io: As in Lightning, as is one in the Trainer's ``plugins``; it is wrapped so that old scaler state
            is read.
        precision_plugin: As in Lightning.
        device_prefetch: See above.
        prefetch_batches: How many batches are kept on the device, 1 or more.
        memory_format: ``None``, ``"channels_last"``, ``"contiguous"`` or ``"measure"``, which needs the module's
            ``example_input_array``.
        cudnn_benchmark: ``True``, ``False``, or ``None`` to leave it.
        matmul_precision: ``"highest"``, ``"high"``, ``"medium"``, or ``None`` to leave it.
        release_gradients: See above.
        lean_step: See above; needs Lightning 2.6. Set aside under a profiler, and where the Trainer's loop or automatic
            optimization is not Lightning's own.
        lean_logging: See above; needs Lightning 2.6.

    Raises:
        MisconfigurationException: If the Trainer has more than one device or more than one machine.
        ValueError: If a setting is not one of those above.
        TypeError: If a switch is no bool.
        LightningMismatchError: If a lean part is asked for and Lightning is not 2.6.

    Example:
        >>> import lightning_turbo
        >>> from lightning.pytorch import Trainer
        >>> type(Trainer(accelerator="cpu", strategy="turbo", logger=False).strategy).__name__
        'TurboStrategy'
    """

    strategy_name = "turbo"

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Any = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        device_prefetch: bool = True,
        prefetch_batches: int = 2,
        memory_format: str | None = None,
        cudnn_benchmark: bool | None = True,
        matmul_precision: MatmulPrecision | None = None,
        release_gradients: bool = True,
        lean_step: bool = False,
        lean_logging: bool = False,
    ) -> None:
        check_binding("TurboStrategy")
        super().__init__("cpu" if device is None else device, accelerator, checkpoint_io, precision_plugin)
        self.checkpoint_io = self._checkpoint_io
        self._parallel_devices: list[torch.device] | None = None if device is None else [self._root_device]
        self.parts = TurboParts(
            device_prefetch=device_prefetch,
            prefetch_batches=prefetch_batches,
            memory_format=memory_format,
            cudnn_benchmark=cudnn_benchmark,
            matmul_precision=matmul_precision,
            release_gradients=release_gradients,
            lean_step=lean_step,
            lean_logging=lean_logging,
        )

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device, in a list; the Trainer puts in the one that it chose."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise MisconfigurationException(
                f"strategy='turbo' was given {len(devices)} devices; accepted is one. Take strategy='turbo_ddp'."
            )
        self._parallel_devices = devices
        self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        """The number of machines; the Trainer puts in the one that it was given."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise MisconfigurationException(
                f"strategy='turbo' was given num_nodes={num_nodes}; accepted is 1. Take strategy='turbo_ddp'."
            )

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, with the parts before and after."""
        self.parts.before_setup(self, trainer)
        super().setup(trainer)
        self.parts.after_setup(self, trainer)


class TurboDDPStrategy(_TurboStrategy, DDPStrategy, LeanStrategy):
    """Lightning's DDP with the techniques around the step switched on: ``strategy="turbo_ddp"``.

    All parts of ``TurboStrategy``, and those below. Needs torchrun or Lightning's own launcher, as ``"ddp"`` does.

    | Part | Default | What it does; off is exactly Lightning's behaviour |
    |---|---|---|
    | ``gradient_as_bucket_view`` | ``True`` | gradients live in DDP's buckets: one copy less |
    | ``static_graph`` | ``False`` | for models whose graph never changes; torch checks it once |
    | ``grad_compression`` | ``None`` | ``"bf16"`` (CUDA) or ``"fp16"``: half the bytes, rounded |
    | ``sync_batchnorm`` | ``False`` | batch norm over all ranks (CUDA) |
    | ``sigterm_every`` | 1 | batches between two agreements of the ranks on signals, a wait for all of them |

    Args:
        *args: As in Lightning's ``DDPStrategy``.
        device_prefetch: As in ``TurboStrategy``.
        prefetch_batches: As in ``TurboStrategy``.
        memory_format: As in ``TurboStrategy``.
        cudnn_benchmark: As in ``TurboStrategy``.
        matmul_precision: As in ``TurboStrategy``.
        release_gradients: As in ``TurboStrategy``.
        lean_step: As in ``TurboStrategy``.
        lean_logging: As in ``TurboStrategy``.
        gradient_as_bucket_view: See above.
        static_graph: See above; right only if every step uses the same parameters in the same way. Not with
            accumulated gradients.
        grad_compression: See above. Not together with ``ddp_comm_hook``.
        sync_batchnorm: See above.
        sigterm_every: See above, 1 or more; needs Lightning 2.6. Above 1, all ranks stop at SIGTERM, or save and queue
            the job again at Slurm's signal, after the same batch. Set aside where the Trainer's loop or automatic
            optimization is not Lightning's own.
        **kwargs: As in Lightning's ``DDPStrategy``; ``checkpoint_io`` as in ``TurboStrategy``.

    Raises:
        ValueError: If a setting is not one of those above.
        TypeError: If a switch is no bool.
        LightningMismatchError: If a lean part is asked for and Lightning is not 2.6.

    Example:
        >>> from lightning_turbo.strategies import TurboDDPStrategy
        >>> TurboDDPStrategy(grad_compression="bf16").grad_compression
        'bf16'
    """

    strategy_name = "turbo_ddp"

    def __init__(
        self,
        *args: Any,
        device_prefetch: bool = True,
        prefetch_batches: int = 2,
        memory_format: str | None = None,
        cudnn_benchmark: bool | None = True,
        matmul_precision: MatmulPrecision | None = None,
        release_gradients: bool = True,
        lean_step: bool = False,
        lean_logging: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        grad_compression: Compression | None = None,
        sync_batchnorm: bool = False,
        sigterm_every: int = 1,
        **kwargs: Any,
    ) -> None:
        check_binding("TurboDDPStrategy")
        if grad_compression not in (None, *_COMPRESS):
            raise ValueError(
                f"grad_compression={grad_compression!r}; accepted are None, 'bf16' and 'fp16'. Take 'fp16' where NCCL "
                "or the device has no bfloat16, None for exact gradients."
            )
        check_switches(
            gradient_as_bucket_view=gradient_as_bucket_view, static_graph=static_graph, sync_batchnorm=sync_batchnorm
        )
        super().__init__(*args, gradient_as_bucket_view=gradient_as_bucket_view, static_graph=static_graph, **kwargs)
        if grad_compression is not None and self._ddp_comm_hook is not None:
            raise ValueError(
                f"grad_compression={grad_compression!r} and ddp_comm_hook were both given; accepted is one. Wrap the "
                "hook with ddp_comm_wrapper=torch.distributed...default_hooks.bf16_compress_wrapper instead."
            )
        self.checkpoint_io = self._checkpoint_io
        self.static_graph = static_graph
        self.grad_compression = grad_compression
        self.sync_batchnorm = sync_batchnorm
        self.parts = TurboParts(
            device_prefetch=device_prefetch,
            prefetch_batches=prefetch_batches,
            memory_format=memory_format,
            cudnn_benchmark=cudnn_benchmark,
            matmul_precision=matmul_precision,
            release_gradients=release_gradients,
            lean_step=lean_step,
            lean_logging=lean_logging,
            sigterm_every=sigterm_every,
        )

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, with the parts before and after.

        Raises:
            MisconfigurationException: If ranks were started with different settings, or if bfloat16 compression
                meets a device that is not CUDA, which torch cannot do.
        """
        check_agreement(self, trainer)
        if self.grad_compression == "bf16" and self.root_device.type != "cuda":
            raise MisconfigurationException(
                f"grad_compression='bf16' was asked for on {self.root_device}; torch accepts it with NCCL on CUDA. "
                "Take 'fp16', or leave it out."
            )
        self.parts.before_setup(self, trainer)
        if self.sync_batchnorm and is_fitting(trainer):
            if self.root_device.type == "cuda" and isinstance(self.model, nn.Module):
                self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
            else:
                rank_zero_info(f"turbo: sync_batchnorm has no meaning on {self.root_device}.")
        super().setup(trainer)
        self.parts.after_setup(self, trainer)

    def configure_ddp(self) -> None:
        """Wrap the module, and compress its gradients on their way if asked for."""
        super().configure_ddp()
        if self.grad_compression is not None and isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(None, _COMPRESS[self.grad_compression])

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Write a checkpoint, with the states of the loaders of all ranks."""
        keep_states_of_ranks(self.lightning_module, checkpoint)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, with the states of this rank's loaders."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        take_states_of_rank(self.lightning_module, checkpoint)
        return checkpoint

    def on_train_start(self) -> None:
        """As in ``TurboStrategy``, with all that accumulates gradients known.

        Raises:
            MisconfigurationException: If ``static_graph`` meets accumulated gradients, which torch cannot do.
        """
        super().on_train_start()
        module: Any = self.lightning_module
        accumulated = module.trainer.accumulate_grad_batches
        if self.static_graph and accumulated > 1:
            raise MisconfigurationException(
                f"static_graph=True and accumulate_grad_batches={accumulated}; accepted is one of them, because DDP "
                "learns a static graph from a backward pass that it synchronises. Leave one out."
            )
