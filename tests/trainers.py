"""The Trainer of most tests: on a CPU, and it writes and shows nothing."""

from lightning_turbo._lightning import Trainer

FLAGS = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


def quiet_trainer(**settings):
    """Return a Trainer with these settings beside FLAGS."""
    return Trainer(**{**FLAGS, **settings})
