"""``python -m examples.medmnist3d fit --config examples/medmnist3d/config.yaml``: Lightning's command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from lightning.pytorch.cli import LightningCLI

from examples.medmnist3d.data import Volumes
from examples.medmnist3d.model import VolumeClassifier

__all__ = ["TorchrunCLI", "full_names", "launched", "main"]


class TorchrunCLI(LightningCLI):
    """LightningCLI that takes devices and nodes from torchrun, so that the same file serves one process and many."""

    def before_instantiate_classes(self) -> None:
        """Fill in what torchrun knows, where the configuration says nothing."""
        trainer = (self.config[self.subcommand] if self.subcommand else self.config).trainer
        for name, value in launched(os.environ).items():
            if trainer[name] in ("auto", 1):
                trainer[name] = value


def launched(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the devices and nodes that torchrun started, by the Trainer's names; nothing without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return {}
    return {"devices": int(environment["LOCAL_WORLD_SIZE"]), "num_nodes": int(environment["GROUP_WORLD_SIZE"])}


def full_names(arguments: Sequence[str]) -> list[str]:
    """Spell ``--data vesselmnist3d`` and ``--data path.npz`` out as ``--data.source``; files and classes stay."""
    spelled = list(arguments)
    for index, word in enumerate(spelled):
        name, equals, value = word.partition("=")
        value = value if equals else "".join(spelled[index + 1 : index + 2])
        if name == "--data" and (value.endswith(".npz") or (value.isidentifier() and value.islower())):
            spelled[index] = f"--data.source{equals}{value if equals else ''}"
    return spelled


def main() -> TorchrunCLI:
    """Run the command line."""
    sys.argv[1:] = full_names(sys.argv[1:])
    return TorchrunCLI(VolumeClassifier, Volumes, subclass_mode_data=True, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
