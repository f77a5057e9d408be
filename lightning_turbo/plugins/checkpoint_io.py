"""Old checkpoints in a Trainer: scaler state is moved to where ``ApexAMP`` finds it, before Lightning drops it."""

from __future__ import annotations

from typing import Any

from lightning_turbo._compat import CheckpointIO, TorchCheckpointIO, check_binding
from lightning_turbo.amp.convert import move_scaler_state

__all__ = ["AmpCheckpointIO"]


class AmpCheckpointIO(CheckpointIO):
    """Lets ``ApexAMP`` go on from the checkpoints of Lightning 1.x.

    Give both to the Trainer: ``Trainer(plugins=[ApexAMP("O1"), AmpCheckpointIO()])``. Lightning 2 deletes
    ``amp_scaling_state``, which Lightning 1.x wrote under apex, before any plugin sees it; here the scaler state of
    every version is moved to where Lightning looks for ``ApexAMP``'s. All else is left to ``checkpoint_io``.

    Args:
        checkpoint_io: What reads and writes files; Lightning's ``TorchCheckpointIO`` by default.

    Raises:
        TypeError: If ``checkpoint_io`` is none.
        LightningMismatchError: If the program uses the other import name of Lightning.

    Note:
        A checkpoint without scaler state is none of its business: ``ApexAMP`` warns where it would have needed one.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_turbo import AmpCheckpointIO, ApexAMP
        >>> trainer = Trainer(accelerator="cpu", plugins=[ApexAMP("O1"), AmpCheckpointIO()], logger=False)
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        super().__init__()
        check_binding("AmpCheckpointIO")
        if checkpoint_io is not None and not isinstance(checkpoint_io, CheckpointIO):
            raise TypeError(
                f"checkpoint_io={checkpoint_io!r} is a {type(checkpoint_io).__name__}; accepted is a CheckpointIO of "
                "Lightning. Leave it out for Lightning's own."
            )
        self.checkpoint_io = TorchCheckpointIO() if checkpoint_io is None else checkpoint_io

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint as ``checkpoint_io`` does."""
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint and move its scaler state to ``ApexAMP``'s key."""
        checkpoint = self.checkpoint_io.load_checkpoint(path, *args, **kwargs)
        move_scaler_state(checkpoint)
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint as ``checkpoint_io`` does."""
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """End what ``checkpoint_io`` has open."""
        self.checkpoint_io.teardown()
