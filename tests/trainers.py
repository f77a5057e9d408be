"""The Trainer of most tests: on the CPU, without logging, checkpoints or output."""

from lightning_turbo._lightning import Trainer

FLAGS = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


def quiet_trainer(**settings):
    """Return a Trainer with ``FLAGS``, which ``settings`` override."""
    return Trainer(**{**FLAGS, **settings})
