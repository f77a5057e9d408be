"""Small photographs and volumes for the tests of the DALI loaders, from scikit-image and nilearn."""

import functools
from pathlib import Path

import numpy as np

CLASSES = ("brick", "grass", "gravel")


@functools.cache
def texture(name):
    from skimage import data

    return getattr(data, name)()


def photo(name, place, height, width):
    """Return a tile of a texture photograph, tinted so that its three channels differ."""
    whole = texture(name)
    y, x = (place * 37) % (512 - height), (place * 53) % (512 - width)
    tile = whole[y : y + height, x : x + width].astype(np.float32)
    tints = np.array([[1.0, 0.8, 0.6], [0.6, 1.0, 0.7], [0.7, 0.8, 1.0]], dtype=np.float32)
    return (tile[..., None] * tints[CLASSES.index(name)]).clip(0, 255).astype(np.uint8)


def make_photos(root, per_class=8, sizes=((96, 80), (72, 110)), suffixes=(".jpg", ".png")):
    """Write JPEG and PNG photographs, with one subfolder per class, and return the folder."""
    from PIL import Image

    for name in CLASSES:
        folder = Path(root) / name
        folder.mkdir(parents=True, exist_ok=True)
        for n in range(per_class):
            image = Image.fromarray(photo(name, n, *sizes[n % len(sizes)]))
            image.save(
                folder / f"{n:03d}{suffixes[n % len(suffixes)]}", **({"quality": 92} if n % len(suffixes) == 0 else {})
            )
    return Path(root)


@functools.cache
def template():
    """Return the MNI152 template, which is part of nilearn, as float32."""
    from nilearn import datasets

    return datasets.load_mni152_template(resolution=1).get_fdata(dtype=np.float32)


def make_volumes(root, count=10, shape=(12, 10, 10)):
    """Write patches of the brain template as ``.npy`` files, and return pairs of a path and a label."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    whole = template()
    pairs = []
    for n in range(count):
        corner = (60 + 5 * n, 80 + 3 * n, 70 + 2 * n)
        patch = whole[tuple(slice(c, c + s) for c, s in zip(corner, shape, strict=True))]
        np.save(root / f"{n:03d}.npy", patch)
        pairs.append((str(root / f"{n:03d}.npy"), n % 3))
    return pairs
