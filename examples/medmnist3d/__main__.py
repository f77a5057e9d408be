"""The command line, a LightningCLI: ``python -m examples.medmnist3d fit --config examples/medmnist3d/config.yaml``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from lightning.pytorch.cli import LightningCLI

from examples.medmnist3d.data import Volumes
from examples.medmnist3d.model import VolumeClassifier

__all__ = ["TorchrunCLI", "expand_data_option", "main", "torchrun_settings"]


class TorchrunCLI(LightningCLI):
    """LightningCLI that reads devices and nodes from torchrun, so that one file works with and without torchrun."""

    def before_instantiate_classes(self) -> None:
        """Set devices and nodes from torchrun, unless the configuration sets them."""
        trainer = (self.config[self.subcommand] if self.subcommand else self.config).trainer
        for name, value in torchrun_settings(os.environ).items():
            if trainer[name] in ("auto", 1):
                trainer[name] = value


def torchrun_settings(environment: Mapping[str, str]) -> dict[str, int]:
    """Return torchrun's devices and nodes as arguments of the Trainer, or an empty dict without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return {}
    return {"devices": int(environment["LOCAL_WORLD_SIZE"]), "num_nodes": int(environment["GROUP_WORLD_SIZE"])}


def expand_data_option(arguments: Sequence[str]) -> list[str]:
    """Replace ``--data vesselmnist3d`` and ``--data path.npz`` by ``--data.source``; keep classes and YAML files."""
    expanded = list(arguments)
    for index, word in enumerate(expanded):
        name, equals, value = word.partition("=")
        value = value if equals else "".join(expanded[index + 1 : index + 2])
        if name == "--data" and (value.endswith(".npz") or (value.isidentifier() and value.islower())):
            expanded[index] = f"--data.source{equals}{value if equals else ''}"
    return expanded


def main() -> TorchrunCLI:
    """Run the command line."""
    sys.argv[1:] = expand_data_option(sys.argv[1:])
    return TorchrunCLI(VolumeClassifier, Volumes, subclass_mode_data=True, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
