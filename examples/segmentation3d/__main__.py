"""Train a U-Net on patches of 3D scans, from a folder of BraTS or nnU-Net.

The scans are packed once. Patches are read from the packed file and augmented on the device. The network trains with O1
and ``strategy="turbo"``, and is validated on whole scans with a sliding window. If a run was stopped, the same command
resumes it. Without FOLDER, small synthetic scans are written. ``--row monai`` trains the same network with MONAI's
loading only.
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
PER_SCAN = 4  # patches per scan and epoch
FOLDS = 5  # one scan in so many is for validation
ROUNDS = 3  # runs of each row for --page
ABOUT = """# Segmentation of 3D scans

A U-Net is trained on patches of scans with label volumes, which a DataLoader reads in worker processes. `turbo`: packed
scans, patches, augmentation of whole batches, O1 in bfloat16, `strategy="turbo"`. `monai`: MONAI's `CacheDataset`,
crops and transforms of each sample, float32. Values are medians over alternating runs, each of which starts from the
files. The seconds of an epoch exclude validation. Both rows pack the scans before the first epoch, because the
intensity statistics are computed there. The Dice after so few epochs only shows that both networks learn.
"""


class Segmentation(pl.LightningModule):
    """A U-Net, trained on patches and validated on whole scans.

    Args:
        channels: Number of modalities.
        classes: Number of classes, including the background.
        patch: Size of a patch in voxels.
        normalize: Transform that normalizes whole scans as it normalizes training patches.
        width: Number of channels of the first level.
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
        """Log the mean Dice score of a whole scan."""
        image = self.normalize.change(batch["image"].float())
        predicted = sliding_window_inference(image, self.patch, 2, self.net, overlap=0.5).argmax(dim=1)
        one_hot = (
            torch.nn.functional.one_hot(each.long(), self.classes).movedim(-1, 1)
            for each in (predicted, batch["label"])
        )
        dice = compute_dice(*one_hot, include_background=False)
        self.log("dice", dice.nanmean(), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class EpochTimer(pl.Callback):
    """Measures the seconds of each training epoch, without validation, and before the first; counts the patches."""

    def __init__(self) -> None:
        self.created, self.prepared = time.perf_counter(), 0.0
        self.seconds: list[float] = []
        self.patches: list[int] = []

    def on_train_epoch_start(self, trainer, pl_module):
        """Start the measurement."""
        self.started, self.count, self.validating = time.perf_counter(), 0, 0.0
        self.prepared = self.prepared or self.started - self.created

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Count the patches of the batch."""
        self.count += len(batch["image"])

    def on_validation_start(self, trainer, pl_module):
        """Start the measurement of validation."""
        self.before = time.perf_counter()

    def on_validation_end(self, trainer, pl_module):
        """Add the seconds of validation, which are subtracted from the epoch."""
        if not trainer.sanity_checking:
            self.validating += time.perf_counter() - self.before

    def on_train_epoch_end(self, trainer, pl_module):
        """Keep the seconds and patches of the epoch."""
        self.seconds.append(time.perf_counter() - self.started - self.validating)
        self.patches.append(self.count)


def split(number: int) -> tuple[list[int], list[int]]:
    """Return the indices of the training scans and of the validation scans."""
    held_out = list(range(FOLDS - 1, number, FOLDS)) or [number - 1]
    return [row for row in range(number) if row not in held_out] or held_out, held_out


def turbo_loaders(packed: Path, args: argparse.Namespace) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the training loader of patches and the validation loader of whole scans."""
    training, held_out = split(len(PackedDataset(packed)))
    patches = PatchDataset(
        packed,
        args.patch,
        per_scan=PER_SCAN,
        foreground=0.5,
        pad={"volumes": 0, "labels": 0},
        keys=KEYS,
        scans=training,
    )
    data = augment.IndexedDataset(patches)
    options = {"num_workers": args.workers, "collate_fn": augment.IndexedCollate(PatchDataset.collate)}
    first = DataLoader(data, args.batch, sampler=SeededSampler(data, seed=args.seed), **options)
    return first, whole_scans(packed, held_out)


def whole_scans(packed: Path, rows: list[int]) -> DataLoader[Any]:
    """Return a loader of whole scans with a channel dimension."""

    def with_channels(sample: Any) -> Any:
        image = sample["image"]
        return {**sample, "image": image if image.dim() == 4 else image[None]}

    return DataLoader(Subset(PackedDataset(packed, keys=KEYS, sample_transform=with_channels), rows), batch_size=1)


def pairs_of(folder: Path, args: argparse.Namespace) -> list[tuple[list[Path], Path]] | None:
    """Return the files of each case, its modalities and its label volume; ``None`` for a folder of nnU-Net."""
    if args.modalities is None:
        return None
    cases = [case for case in sorted(folder.iterdir()) if case.is_dir()]
    return [
        ([case / f"{case.name}{end}.nii.gz" for end in args.modalities], case / f"{case.name}{args.mask}.nii.gz")
        for case in cases
    ]


def monai_loaders(packed: Path, folder: Path, args: argparse.Namespace) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return MONAI's loaders of the same scans, which are cached in memory, cropped and transformed one by one."""
    from monai import data, transforms

    pairs = pairs_of(folder, args)
    if pairs is None:
        raise SystemExit("--row monai: expected --modalities=-t1n,... for the files of a folder of BraTS, got none")
    training, held_out = split(len(pairs))
    files = [{"image": [str(path) for path in pairs[row][0]], "label": str(pairs[row][1])} for row in training]
    both = ("image", "label")
    statistics = PackedDataset(packed).intensities["volumes"]
    normalize = [
        transforms.NormalizeIntensityd(
            "image", [each["mean"] for each in statistics], [each["std"] for each in statistics], channel_wise=True
        )
    ]
    crop = transforms.RandCropByPosNegLabeld(both, "label", args.patch, pos=1, neg=1, num_samples=PER_SCAN)
    modes, radians = ("bilinear", "nearest"), (0.26, 0.26, 0.26)
    random = [
        transforms.RandAffined(both, prob=0.2, rotate_range=radians, scale_range=(0.2, 0.2, 0.2), mode=modes),
        *(transforms.RandFlipd(both, prob=0.5, spatial_axis=axis) for axis in range(3)),
        transforms.RandGaussianNoised("image", prob=0.1, std=0.1),
        transforms.RandScaleIntensityd("image", factors=0.25, prob=0.15),
    ]
    load = transforms.LoadImaged(both, ensure_channel_first=True)
    pad = transforms.SpatialPadd(both, args.patch)
    steps = transforms.Compose([load, pad, *normalize, crop, *random])
    dataset = data.CacheDataset(files, steps, progress=False)
    options = {"num_workers": args.workers, "collate_fn": data.list_data_collate}
    # Each scan yields PER_SCAN patches, so a batch consists of fewer scans.
    first = DataLoader(dataset, max(1, args.batch // PER_SCAN), shuffle=True, **options)
    return first, whole_scans(packed, held_out)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Pack the scans unless they are packed, and train. Resume if an earlier call was stopped.

    Returns:
        ``dice`` of the last validation, ``seconds`` and ``patches`` of each epoch of this call, and ``prepared``, the
        seconds before the first epoch.
    """
    timer = EpochTimer()
    out, folder = args.out, args.folder
    if folder is None:
        folder = out / "scans"
        if not folder.exists():
            write_scans(folder, args.scans, args.size)
        args.modalities = args.modalities or ("-t1n", "-t2w")
    packed = out / "packed"
    if not packed.exists():
        pack_folder(folder, packed, pairs=pairs_of(folder, args), spacing=args.spacing, num_workers=args.workers)
    whole = PackedDataset(packed, keys=["volumes"])
    channels = whole[0].shape[0] if whole[0].dim() == 4 else 1
    labels = PackedDataset(packed, keys=["labels.classes"])  # rows of (class, number of its voxels)
    classes = 1 + max(int(labels[row][:, 0].max()) for row in range(len(labels)) if len(labels[row]))
    normalize = augment.NormalizeIntensity(whole.intensities["volumes"])
    pl.seed_everything(args.seed)
    model = Segmentation(channels, classes, args.patch, normalize, args.width)
    callbacks: list[Any] = [timer, ModelCheckpoint(out / args.row, save_last=True)]
    settings: dict[str, Any] = {}
    if args.row == "turbo":
        steps = [
            normalize,
            augment.RandomAffine(degrees=15, scale=(0.8, 1.2), p=0.2),
            augment.RandomFlip(),
            augment.RandomGaussianNoise(std=(0.0, 0.1)),
            augment.RandomBrightness(),
        ]
        callbacks += [
            AugmentBatches(
                augment.BatchAugmentation(steps, seed=args.seed, image="image", mask="label", dtype=torch.float32)
            ),
            Prefetch(sample_seeds=args.seed),
        ]
        # As in apex, GPUs use float16 with a loss scale. CPUs use bfloat16.
        dtype = {} if torch.cuda.is_available() else {"dtype": torch.bfloat16}
        settings = {"strategy": "turbo", "plugins": ApexAMP("O1", **dtype)}
        loaders = turbo_loaders(packed, args)
    else:
        loaders = monai_loaders(packed, folder, args)
    trainer = pl.Trainer(
        max_epochs=args.epochs, callbacks=callbacks, logger=False, check_val_every_n_epoch=args.validate_every,
        enable_progress_bar=sys.stderr.isatty(), enable_model_summary=False, **settings,
    )  # fmt: skip
    last = out / args.row / "last.ckpt"
    trainer.fit(model, *loaders, ckpt_path=last if last.exists() else None)
    dice = trainer.callback_metrics.get("dice")
    found = {"dice": None if dice is None else float(dice), "prepared": timer.prepared}
    return {**found, "seconds": timer.seconds, "patches": timer.patches}


def compare(args: argparse.Namespace, argv: list[str]) -> None:
    """Train the rows alternately, each run in a new process that starts from the files, and write the page."""
    if args.folder is None and not (args.out / "scans").exists():
        write_scans(args.out / "scans", args.scans, args.size)
    runs: dict[str, list[dict[str, Any]]] = {row: [] for row in ROWS}
    options = [word for word in argv if word not in ("--page", str(args.page))]
    for _ in range(ROUNDS):
        for row in ROWS:
            for name in ("packed", *ROWS):
                shutil.rmtree(args.out / name, ignore_errors=True)
            words = [sys.executable, "-W", "ignore", "-m", "examples.segmentation3d", *options, "--row", row, "--json"]
            ran = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
            runs[row].append(json.loads(ran.stdout.splitlines()[-1]))
    head = ["Row", "Seconds of an epoch", "Patches/s", "Seconds before the first epoch", "Dice of the last"]
    table = [[row, *(f"{median(values):.3g}" for values in columns(runs[row]))] for row in ROWS]
    facts = describe_machine("cpu")
    machine = f"{facts['processor']}, {facts['cores']} cores, torch {torch.__version__}, commit {facts['commit'][:7]}"
    command = shlex.join(["python", "-m", "examples.segmentation3d", *argv])
    made = f"`{command}`, {datetime.now(timezone.utc):%Y-%m-%d}, {machine}."
    args.page.write_text("\n".join([ABOUT, *markdown_table(head, table), "", made, ""]))


def columns(runs: list[dict[str, Any]]) -> list[list[float]]:
    """Return seconds of an epoch, patches per second, seconds before the first epoch, and Dice of all runs."""
    epochs = [sum(run["seconds"]) / len(run["seconds"]) for run in runs]
    rates = [sum(run["patches"]) / sum(run["seconds"]) for run in runs]
    return [epochs, rates, [run["prepared"] for run in runs], [run["dice"] for run in runs]]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""

    def numbers(kind: Any) -> Any:
        return lambda text: tuple(kind(part) for part in text.split("x"))

    parser = argparse.ArgumentParser(
        prog="python -m examples.segmentation3d", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="folder of BraTS or nnU-Net (default: synthetic scans)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/segmentation3d"), help="for packed scans and checkpoints"
    )
    parser.add_argument(
        "--modalities",
        type=lambda text: tuple(text.split(",")),
        help="of BraTS, for example --modalities=-t1n,-t2w (default: a folder of nnU-Net)",
    )
    parser.add_argument("--mask", default="-seg", help="suffix of the label volumes of BraTS (default: -seg)")
    parser.add_argument(
        "--spacing", type=numbers(float), help="spacing to resample to in millimeters, for example 1x1x1"
    )
    parser.add_argument(
        "--patch", type=numbers(int), default=(96, 96, 96), help="size of a patch in voxels (default: 96x96x96)"
    )
    parser.add_argument("--batch", type=int, default=2, help="patches per batch (default: 2)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first level (default: 16)")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--validate-every", type=int, default=1, help="epochs between validations (default: 1)")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (default: 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--row", choices=ROWS, default="turbo", help="monai: the same network with MONAI's loading only"
    )
    parser.add_argument("--page", type=Path, help="run both rows alternately, and write their speed to this page")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--scans", type=int, default=10, help="number of synthetic scans (default: 10)")
    parser.add_argument(
        "--size", type=numbers(int), default=(48, 48, 40), help="size of a synthetic scan (default: 48x48x40)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train, and print the speed and the Dice score."""
    args = parse(argv)
    if args.page is not None:
        compare(args, sys.argv[1:] if argv is None else argv)
        return 0
    found = train(args)
    if args.json:
        print(json.dumps(found))
        return 0
    seconds, patches = found["seconds"], found["patches"]
    if not seconds:
        print(f"{args.out / args.row}: all {args.epochs} epochs are already trained")
        return 0
    rate = sum(patches) / sum(seconds)
    dice = "none" if found["dice"] is None else f"{found['dice']:.3f}"
    print(
        f"{args.row}: {len(seconds)} epochs of {sum(seconds) / len(seconds):.2f} s, {rate:.1f} patches/s, Dice {dice}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
