"""The demo's data: real, split without leaks."""

import numpy as np
import sklearn  # noqa: F401  (sets variables of the environment when it is first imported)
import torch
from nilearn import datasets

from examples.demo import data as demo_data
from examples.demo.data import load_mni
from examples.demo.volumes import write_volumes


def test_mni_parts_share_no_voxel_and_no_mirrored_voxel():
    data = load_mni()
    maps = datasets.load_mni152_gm_template(resolution=1), datasets.load_mni152_wm_template(resolution=1)
    train, val = data.train, data.val
    assert train.volume is val.volume
    assert train.volume.shape == (197, 233, 189)
    image, label = train[5]
    x, y, z = train.corners[5]
    assert torch.equal(image[0], train.volume[x : x + 28, y : y + 28, z : z + 28])
    assert image.untyped_storage().data_ptr() == train.volume.untyped_storage().data_ptr()  # a view
    assert label in (0, 1)
    assert (len(train) > 700, len(val) > 400) == (True, True)
    gray, white = (d.get_fdata()[x : x + 28, y : y + 28, z : z + 28].sum() for d in maps)
    assert label == (white > gray)
    assert 0.5 <= np.bincount(val.labels.numpy()).max() / len(val) < 0.8
    seen = np.zeros(train.volume.shape, dtype=np.int8)
    for part, mark in ((train, 1), (val, 2)):
        for x, y, z in part.corners:
            seen[x : x + 28, y : y + 28, z : z + 28] |= mark
    assert set(np.unique(seen)) == {0, 1, 2}  # no voxel carries both marks
    mirrored = seen[::-1]
    assert not np.any((seen > 0) & (mirrored > 0) & (seen != mirrored))
    assert not seen[:99].any()  # one hemisphere is dropped
    lowest_of_train = train.corners[:, 1].min()
    highest_of_val = val.corners[:, 1].max() + 27
    assert lowest_of_train - highest_of_val > 2 * demo_data.GAP


def test_volumes_come_back_from_their_files_with_their_labels(tmp_path):
    volume = torch.randn(40, 40, 40, generator=torch.Generator().manual_seed(0))
    patches = demo_data.VolumePatches(volume, np.array([[0, 0, 0], [5, 6, 7], [1, 2, 3]]), torch.tensor([1, 0, 1]))
    files = write_volumes(patches, tmp_path)
    assert len(files) == 3
    assert len(list(tmp_path.rglob("*.nii.gz"))) == 3
    for index in range(3):
        image, label = files[index]
        kept = patches[index][0]
        low, high = torch.quantile(kept, torch.tensor([0.005, 0.995]))
        torch.testing.assert_close(image, kept.clamp(low, high), atol=1e-3, rtol=0)  # 16 bits a voxel
        assert (image.dtype, label) == (torch.float32, patches.labels[index])
