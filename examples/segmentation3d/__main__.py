"""Train a U-Net on patches of 3D scans: BraTS' and nnU-Net's folders as they are.

The scans are packed once, patches are read from the packed file and augmented on the device, the network trains under
O1 and ``strategy="turbo"``, and is validated on whole scans by a sliding window. The same command goes on with what was
stopped. Without FOLDER small scans are made. ``--row monai`` trains the same network with MONAI's loading alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import compute_dice
from monai.networks.nets import UNet
from torch.utils.data import DataLoader, Subset

from examples.segmentation3d.scans import write_scans
from lightning_turbo import ApexAMP, AugmentBatches, PackedDataset, PatchDataset, Prefetch, SeededSampler, augment
from lightning_turbo.data import pack_folder
from lightning_turbo.measure import describe_machine, markdown_table

ROWS = ("turbo", "monai")
KEYS = {"image": "volumes", "label": "labels"}
PER_SCAN = 4  # patches of a scan in an epoch
FOLD = 5  # one scan of so many is for validation
ROUNDS = 3  # in which the rows take turns
ABOUT = """# Segmentation of 3D scans

A U-Net on patches of scans with label volumes, by a DataLoader with worker processes. `turbo`: packed scans, patches,
augmentation of whole batches, O1 in bfloat16, `strategy="turbo"`. `monai`: MONAI's `CacheDataset`, crops and transforms
of each sample, float32. Medians of runs in turns, each from the files on; validation is left out of the epochs. Both
rows pack before the first epoch, as the statistics of the intensities come from there. After so few epochs the Dice
says no more than that both learn.
"""


class Segmentation(pl.LightningModule):
    """A U-Net that is trained on patches and validated on whole scans.

    Args:
        channels: Modalities of a scan.
        classes: Classes with the background.
        patch: Size of a patch in voxels.
        normalize: What normalises whole scans, as training patches are.
        width: Channels of the first level.
    """

    def __init__(self, channels: int, classes: int, patch: Sequence[int], normalize: Any, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.net = UNet(3, channels, classes, channels=widths, strides=[2, 2], num_res_units=2, norm="instance")
        self.loss = DiceCELoss(to_onehot_y=True, softmax=True)
        self.patch, self.classes, self.normalize = tuple(patch), classes, normalize

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch of patches."""
        loss = self.loss(self.net(batch["image"]).float(), batch["label"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean Dice of a whole scan."""
        image = self.normalize.change(batch["image"].float())
        found = sliding_window_inference(image, self.patch, 2, self.net, overlap=0.5).argmax(dim=1)
        both = (
            torch.nn.functional.one_hot(each.long(), self.classes).movedim(-1, 1) for each in (found, batch["label"])
        )
        dice = compute_dice(*both, include_background=False)
        self.log("dice", dice.nanmean(), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train with AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class EpochTimer(pl.Callback):
    """Notes the seconds and patches of each training epoch, without its validation, and those before the first."""

    def __init__(self) -> None:
        self.begun, self.prepared = time.perf_counter(), 0.0
        self.seconds: list[float] = []
        self.patches: list[int] = []

    def on_train_epoch_start(self, trainer, pl_module):
        """Begin an epoch."""
        self.started, self.count, self.validating = time.perf_counter(), 0, 0.0
        self.prepared = self.prepared or self.started - self.begun

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Count the patches of a batch."""
        self.count += len(batch["image"])

    def on_validation_start(self, trainer, pl_module):
        """Leave out the time of the validation."""
        self.before = time.perf_counter()

    def on_validation_end(self, trainer, pl_module):
        """Leave out the time of the validation."""
        if not trainer.sanity_checking:
            self.validating += time.perf_counter() - self.before

    def on_train_epoch_end(self, trainer, pl_module):
        """End an epoch."""
        self.seconds.append(time.perf_counter() - self.started - self.validating)
        self.patches.append(self.count)


def split(number: int) -> tuple[list[int], list[int]]:
    """Return the rows of the scans for training and for validation."""
    held_out = list(range(FOLD - 1, number, FOLD)) or [number - 1]
    return [row for row in range(number) if row not in held_out] or held_out, held_out


def turbo_loaders(packed: Path, asked: argparse.Namespace) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the loaders of patches of packed scans, and of whole scans."""
    training, held_out = split(len(PackedDataset(packed)))
    patches = PatchDataset(
        packed,
        asked.patch,
        per_scan=PER_SCAN,
        foreground=0.5,
        pad={"volumes": 0, "labels": 0},
        keys=KEYS,
        scans=training,
    )
    data = augment.IndexedDataset(patches)
    options = {"num_workers": asked.workers, "collate_fn": augment.IndexedCollate(PatchDataset.collate)}
    first = DataLoader(data, asked.batch, sampler=SeededSampler(data, seed=asked.seed), **options)
    return first, whole_scans(packed, held_out)


def whole_scans(packed: Path, rows: list[int]) -> DataLoader[Any]:
    """Return a loader of whole scans with an axis of channels."""

    def with_channels(sample: Any) -> Any:
        image = sample["image"]
        return {**sample, "image": image if image.dim() == 4 else image[None]}

    return DataLoader(Subset(PackedDataset(packed, keys=KEYS, sample_transform=with_channels), rows), batch_size=1)


def monai_loaders(packed: Path, folder: Path, asked: argparse.Namespace) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return MONAI's loaders of the same scans: all of them in memory, crops and transforms of each sample."""
    from monai import data, transforms

    names = PackedDataset(packed, keys=["files"])
    training, held_out = split(len(names))
    ends = asked.modalities or ("",)
    files = []
    for row in training:
        first = str(folder / names[row])
        images = [first.replace(f"{ends[0]}.nii", f"{end}.nii") for end in ends]
        files.append({"image": images, "label": first.replace(f"{ends[0]}.nii", f"{asked.mask}.nii")})
    both = ("image", "label")
    statistics = PackedDataset(packed).intensities["volumes"]
    normalize = [
        transforms.NormalizeIntensityd(
            "image", [each["mean"] for each in statistics], [each["std"] for each in statistics], channel_wise=True
        )
    ]
    crop = transforms.RandCropByPosNegLabeld(both, "label", asked.patch, pos=1, neg=1, num_samples=PER_SCAN)
    modes, turn = ("bilinear", "nearest"), (0.26, 0.26, 0.26)
    random = [
        transforms.RandAffined(both, prob=0.2, rotate_range=turn, scale_range=(0.2, 0.2, 0.2), mode=modes),
        *(transforms.RandFlipd(both, prob=0.5, spatial_axis=axis) for axis in range(3)),
        transforms.RandGaussianNoised("image", prob=0.1, std=0.1),
        transforms.RandScaleIntensityd("image", factors=0.25, prob=0.15),
    ]
    load = transforms.LoadImaged(both, ensure_channel_first=True)
    pad = transforms.SpatialPadd(both, asked.patch)
    steps = transforms.Compose([load, pad, *normalize, crop, *random])
    dataset = data.CacheDataset(files, steps, progress=False)
    options = {"num_workers": asked.workers, "collate_fn": data.list_data_collate}
    # Each scan gives PER_SCAN patches at once, which make up the batch.
    first = DataLoader(dataset, max(1, asked.batch // PER_SCAN), shuffle=True, **options)
    return first, whole_scans(packed, held_out)


def train(asked: argparse.Namespace) -> dict[str, Any]:
    """Pack the scans if they are not, and train; go on where an earlier call was stopped.

    Returns:
        ``dice`` of the last validation, ``seconds`` and ``patches`` of each epoch of this call, and the seconds that
        it was ``prepared`` before.
    """
    timer = EpochTimer()
    out, folder = asked.out, asked.folder
    if folder is None:
        folder = out / "scans"
        if not folder.exists():
            write_scans(folder, asked.scans, asked.size)
        asked.modalities = asked.modalities or ("-t1n", "-t2w")
    packed = out / "packed"
    if not packed.exists():
        pack_folder(folder, packed, modalities=asked.modalities, spacing=asked.spacing, num_workers=asked.workers)
    whole = PackedDataset(packed, keys=["volumes"])
    channels = whole[0].shape[0] if whole[0].dim() == 4 else 1
    labels = PackedDataset(packed, keys=["labels.classes"])  # rows of a class and its number of places
    classes = 1 + max(int(labels[row][:, 0].max()) for row in range(len(labels)) if len(labels[row]))
    normalize = augment.NormalizeIntensity(whole.intensities["volumes"])
    pl.seed_everything(asked.seed)
    model = Segmentation(channels, classes, asked.patch, normalize, asked.width)
    callbacks: list[Any] = [timer, ModelCheckpoint(out / asked.row, save_last=True)]
    settings: dict[str, Any] = {}
    if asked.row == "turbo":
        steps = [
            normalize,
            augment.RandomAffine(degrees=15, scale=(0.8, 1.2), p=0.2),
            augment.RandomFlip(),
            augment.RandomGaussianNoise(std=(0.0, 0.1)),
            augment.RandomBrightness(),
        ]
        callbacks += [
            AugmentBatches(
                augment.BatchAugmentation(steps, seed=asked.seed, image="image", mask="label", dtype=torch.float32)
            ),
            Prefetch(sample_seeds=asked.seed),
        ]
        # On a GPU float16 with a loss scale, as apex has it; CPUs multiply in bfloat16.
        dtype = {} if torch.cuda.is_available() else {"dtype": torch.bfloat16}
        settings = {"strategy": "turbo", "plugins": ApexAMP("O1", **dtype)}
        loaders = turbo_loaders(packed, asked)
    else:
        loaders = monai_loaders(packed, folder, asked)
    trainer = pl.Trainer(
        max_epochs=asked.epochs, callbacks=callbacks, logger=False, check_val_every_n_epoch=asked.validate_every,
        enable_progress_bar=sys.stderr.isatty(), enable_model_summary=False, **settings,
    )  # fmt: skip
    last = out / asked.row / "last.ckpt"
    trainer.fit(model, *loaders, ckpt_path=last if last.exists() else None)
    dice = trainer.callback_metrics.get("dice")
    found = {"dice": None if dice is None else float(dice), "prepared": timer.prepared}
    return {**found, "seconds": timer.seconds, "patches": timer.patches}


def compare(asked: argparse.Namespace, argv: list[str]) -> None:
    """Train the rows in turns, each time in a process of its own from the files on, and write the page."""
    if asked.folder is None and not (asked.out / "scans").exists():
        write_scans(asked.out / "scans", asked.scans, asked.size)
    runs: dict[str, list[dict[str, Any]]] = {row: [] for row in ROWS}
    options = [word for word in argv if word not in ("--page", str(asked.page))]
    for _ in range(ROUNDS):
        for row in ROWS:
            for name in ("packed", *ROWS):
                shutil.rmtree(asked.out / name, ignore_errors=True)
            words = [sys.executable, "-W", "ignore", "-m", "examples.segmentation3d", *options, "--row", row, "--json"]
            ran = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            runs[row].append(json.loads(ran.stdout.splitlines()[-1]))
    head = ["Row", "Seconds of an epoch", "Patches/s", "Seconds before the first epoch", "Dice of the last"]
    table = [[row, *(f"{median(values):.3g}" for values in columns(runs[row]))] for row in ROWS]
    facts = describe_machine("cpu")
    machine = f"{facts['processor']}, {facts['cores']} cores, torch {torch.__version__}, commit {facts['commit'][:7]}"
    command = shlex.join(["python", "-m", "examples.segmentation3d", *argv])
    made = f"`{command}`, {datetime.now(timezone.utc):%Y-%m-%d}, {machine}."
    asked.page.write_text("\n".join([ABOUT, *markdown_table(head, table), "", made, ""]))


def columns(runs: list[dict[str, Any]]) -> list[list[float]]:
    """Return seconds of an epoch, patches a second, seconds before the first epoch, and Dice, each for all runs."""
    epochs = [sum(run["seconds"]) / len(run["seconds"]) for run in runs]
    rates = [sum(run["patches"]) / sum(run["seconds"]) for run in runs]
    return [epochs, rates, [run["prepared"] for run in runs], [run["dice"] for run in runs]]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""

    def numbers(kind: Any) -> Any:
        return lambda text: tuple(kind(part) for part in text.split("x"))

    parser = argparse.ArgumentParser(
        prog="python -m examples.segmentation3d", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="BraTS' or nnU-Net's folder (default: small made scans)")
    parser.add_argument("--out", type=Path, default=Path("runs/segmentation3d"), help="packed scans and checkpoints")
    parser.add_argument("--modalities", type=lambda text: tuple(text.split(",")), help="as --modalities=-t1n,-t2w")
    parser.add_argument("--mask", default="-seg", help="end of the label volumes, for --row monai (default: -seg)")
    parser.add_argument("--spacing", type=numbers(float), help="millimetres to resample to, as 1x1x1")
    parser.add_argument("--patch", type=numbers(int), default=(96, 96, 96), help="voxels (default: 96x96x96)")
    parser.add_argument("--batch", type=int, default=2, help="patches of a batch (default: 2)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first level (default: 16)")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--validate-every", type=int, default=1, help="epochs between validations (default: 1)")
    parser.add_argument("--workers", type=int, default=1, help="processes that load (default: 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--row", choices=ROWS, default="turbo", help="monai: the same network, loaded by MONAI alone")
    parser.add_argument("--page", type=Path, help="run both rows in turns, and write how fast they are to this page")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--scans", type=int, default=10, help="made scans (default: 10)")
    parser.add_argument("--size", type=numbers(int), default=(48, 48, 40), help="of a made scan (default: 48x48x40)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train, and say how good and how fast it was."""
    asked = parse(argv)
    if asked.page is not None:
        compare(asked, sys.argv[1:] if argv is None else argv)
        return 0
    found = train(asked)
    if asked.json:
        print(json.dumps(found))
        return 0
    seconds, patches = found["seconds"], found["patches"]
    if not seconds:
        print(f"{asked.out / asked.row}: {asked.epochs} epochs were trained already")
        return 0
    rate = sum(patches) / sum(seconds)
    dice = "none" if found["dice"] is None else f"{found['dice']:.3f}"
    print(
        f"{asked.row}: {len(seconds)} epochs of {sum(seconds) / len(seconds):.2f} s, {rate:.1f} patches/s, Dice {dice}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
