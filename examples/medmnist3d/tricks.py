"""The tricks of the ablation: what each of them changes in a plain run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from examples.medmnist3d.data import samples
from lightning_turbo import ApexAMP, DropBiasBeforeNorm, ExactAccumulation, GradToNone, MemoryFormat

__all__ = ["ALL", "PLAIN", "TRICKS", "Variant"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings of one run.

    Args:
        trainer: Arguments of the Trainer.
        model: Arguments of the module.
        data: Arguments of the DataModule.
        prefetch: Whether batches are loaded in the background.
        plugins: Functions that create the Trainer's plugins, for each run.
        callbacks: Functions that create the Trainer's callbacks, for each run.
    """

    trainer: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    prefetch: bool = False
    plugins: tuple[Callable[[], Any], ...] = ()
    callbacks: tuple[Callable[[], Any], ...] = ()

    def __or__(self, other: Variant) -> Variant:
        return Variant(
            trainer=self.trainer | other.trainer,
            model=self.model | other.model,
            data=self.data | other.data,
            prefetch=self.prefetch or other.prefetch,
            plugins=self.plugins + other.plugins,
            callbacks=self.callbacks + other.callbacks,
        )


PLAIN = Variant(model={"schedule": None, "pos_weight": 1.0}, data={"packed": False})
TRICKS = {
    "pos_weight": Variant(model={"pos_weight": None}),
    "cyclic rate": Variant(model={"schedule": "cyclic"}),
    "clipping": Variant(trainer={"gradient_clip_val": 1.0}),
    "accumulation": Variant(trainer={"accumulate_grad_batches": 2}, callbacks=(lambda: ExactAccumulation(samples),)),
    "no bias before norm": Variant(callbacks=(lambda: DropBiasBeforeNorm(network="net"),)),
    "gradients to None": Variant(callbacks=(GradToNone,)),
    "prefetch": Variant(prefetch=True),
    "packed": Variant(data={"packed": True}),
    "channels last": Variant(callbacks=(lambda: MemoryFormat("channels_last"),)),
    "O1": Variant(plugins=(lambda: ApexAMP("O1"),)),
    "O2": Variant(plugins=(lambda: ApexAMP("O2"),)),
}


def _together() -> Variant:
    everything = PLAIN
    for name, trick in TRICKS.items():
        if name != "O2":  # one level at a time
            everything |= trick
    return everything


ALL = _together()
