"""Train a ResNet-50 on ImageNet with DALI, apex's precision levels and DDP.

    python examples/imagenet_dali.py /data/imagenet --devices 8
    torchrun --nproc-per-node 8 examples/imagenet_dali.py /data/imagenet
    python examples/imagenet_dali.py --demo

The folder has the subfolders ``train`` and ``val``, each with one subfolder per class. ``--demo`` trains a ResNet-18 on
the CPU, on photographs of textures from scikit-image, in less than a minute.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from monai.networks.nets import resnet18, resnet50
from torch.nn import functional as F

from lightning_turbo import ApexAMP, AtomicCheckpointIO, DALIDataModule


class Classifier(LightningModule):
    """A ResNet trained as by He et al. and Goyal et al.: SGD, label smoothing, a warm-up and a cosine schedule."""

    def __init__(self, build, classes, learning_rate):
        super().__init__()
        net = build(spatial_dims=2, n_input_channels=3, num_classes=classes, conv1_t_stride=2)
        self.net = net.to(memory_format=torch.channels_last)
        self.learning_rate = learning_rate

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.net(images).float(), labels, label_smoothing=0.1)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        correct = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", correct, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self):
        decayed = [p for p in self.net.parameters() if p.ndim > 1]
        plain = [p for p in self.net.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 5e-5}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=self.learning_rate, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = max(1, steps // 18)  # five of ninety epochs
        rise = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warmup)
        fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warmup))
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [warmup])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_demo(root):
    """Write tiles of three scikit-image photographs: the upper part for training, the lower part for validation."""
    from PIL import Image
    from skimage import data

    for name in ("brick", "grass", "gravel"):
        whole = getattr(data, name)()
        for part, top, bottom in (("train", 0, 384), ("val", 384, 512)):
            folder = Path(root, part, name)
            folder.mkdir(parents=True, exist_ok=True)
            for y in range(top, bottom - 95, 32):
                for x in range(0, 512 - 95, 64):
                    Image.fromarray(whole[y : y + 96, x : x + 96]).save(folder / f"{y:03d}-{x:03d}.jpg", quality=90)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="folder with train and val, each with one subfolder per class")
    parser.add_argument("--demo", action="store_true", help="use small data and a small network on the CPU")
    started = {name: int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")}  # of torchrun
    parser.add_argument("--devices", type=int, default=started["LOCAL_WORLD_SIZE"], help="devices per machine")
    parser.add_argument("--nodes", type=int, default=started["GROUP_WORLD_SIZE"], help="number of machines")
    parser.add_argument("--level", default="O1", choices=("O0", "O1", "O2", "O3"), help="precision level of ApexAMP")
    parser.add_argument("--batch-size", type=int, default=None, help="samples per device (default: 256, demo: 16)")
    parser.add_argument("--epochs", type=int, default=None, help="number of epochs (default: 90, demo: 3)")
    parser.add_argument(
        "--threads", type=int, default=None, help="threads of DALI per device (default: CPU cores per device)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", default=None, help="checkpoint to resume from")
    options = parser.parse_args()
    if (options.folder is None) != options.demo:
        parser.error("expected either a folder or --demo")
    options.batch_size = options.batch_size or (16 if options.demo else 256)
    options.epochs = options.epochs or (3 if options.demo else 90)
    return options


def main(options, folder):
    seed_everything(options.seed)
    if options.demo:
        torch.set_num_threads(1)  # more threads do not help layers this small, and DALI has its own threads
    size = 32 if options.demo else 224
    try:
        data = DALIDataModule(
            Path(folder, "train"), Path(folder, "val"), batch_size=options.batch_size, drop_last=True,
            num_threads=options.threads, images={"size": size, "channels_last": True},
        )  # fmt: skip
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"{error}\nPass a folder with train and val, each with one subfolder per class, or --demo.")
    classes = len(data.loaders["train"].pipeline.classes)
    # Linear scaling rule: 0.1 for 256 images per step.
    ranks = options.devices * options.nodes
    learning_rate = 0.1 * ranks * options.batch_size / 256
    model = Classifier(resnet18 if options.demo else resnet50, classes, learning_rate)
    cpu = options.demo or not torch.cuda.is_available()
    trainer = Trainer(
        accelerator="cpu" if cpu else "gpu",
        devices=options.devices,
        num_nodes=options.nodes,
        strategy="ddp" if ranks > 1 else "auto",
        plugins=[ApexAMP(options.level, dtype=torch.bfloat16 if cpu else None), AtomicCheckpointIO()],
        max_epochs=options.epochs,
        logger=not options.demo,
        enable_checkpointing=not options.demo,
        log_every_n_steps=10,
    )
    trainer.fit(model, data, ckpt_path=options.resume)
    if trainer.is_global_zero:
        print(f"validation accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    options = parse()
    if options.demo:
        with tempfile.TemporaryDirectory() as folder:
            make_demo(folder)
            main(options, folder)
    else:
        main(options, options.folder)
