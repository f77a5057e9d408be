"""Load volumes that DALI reads, crops, flips and standardizes, with a custom pipeline function.

Run it with ``python examples/dali_volumes.py``. It writes small volumes as ``.npy`` files, loads an epoch of them, and
resumes within the next epoch with a new loader, as a new process would. If a folder is given, it reads the ``.npy``
files in that folder: arrays of shape (depth, height, width) in C order. It requires DALI.
"""

import argparse
import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types

from lightning_turbo import DALILoader


@pipeline_def
def volumes(files, labels, crop, shard_id, num_shards, device, train=True):
    """Return volumes of shape (1, *crop), each standardized on its own, and their labels."""
    # fn.readers.file also returns the label of each file, which fn.readers.numpy does not.
    encoded, label = fn.readers.file(
        files=files, labels=labels, random_shuffle=train, shard_id=shard_id, num_shards=num_shards, pad_last_batch=True
    )
    volume = fn.decoders.numpy(encoded, dtype=types.FLOAT)
    volume = volume.gpu() if device == "gpu" else volume
    volume = fn.reshape(fn.expand_dims(volume, axes=0), layout="CDHW")
    corner = {f"crop_pos_{axis}": fn.random.uniform(range=[0, 1]) if train else 0.5 for axis in "zyx"}
    volume = fn.crop(volume, crop_d=crop[0], crop_h=crop[1], crop_w=crop[2], **corner)
    if train:
        volume = fn.flip(volume, **{axis: fn.random.coin_flip() for axis in ("depthwise", "vertical", "horizontal")})
    return fn.normalize(volume, epsilon=1e-12), label


def make_loader(files, labels, crop, train=True, **settings):
    """Return a loader of batches ``(volumes, labels)`` of four volumes each."""
    arguments = {"files": list(map(str, files)), "labels": list(labels), "crop": crop, "train": train}
    return DALILoader(volumes, batch_size=4, arguments=arguments, seed=0, **settings)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="folder with .npy files")
    parser.add_argument("--crop", type=int, nargs=3, default=(8, 8, 8), help="depth, height and width of the crops")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        if not options.folder:
            for n in range(10):
                np.save(folder / f"{n}.npy", np.random.default_rng(n).normal(size=(12, 10, 10)).astype("float32"))
        files = sorted(folder.glob("*.npy"))
        if not files:
            parser.error(f"expected a folder with .npy files, got {str(folder)!r}")
        labels = list(range(len(files)))  # a unique label per volume shows which ones were loaded
        loader = make_loader(files, labels, options.crop)
        seen = sorted(torch.cat([batch_labels for _, batch_labels in loader]).tolist())
        print(f"epoch 0: {len(loader)} batches, each volume once: {seen == labels}")
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = list(batches)
        loader.close()
        resumed = make_loader(files, labels, options.crop)
        resumed.load_state_dict(state)
        pairs = list(itertools.zip_longest(rest, resumed))
        same = all(a is not None and b is not None and all(map(torch.equal, a, b)) for a, b in pairs)
        resumed.close()
        print(f"epoch 1, resumed after its first batch: {'the same batches, bit for bit' if same else 'other batches'}")


if __name__ == "__main__":
    main()
