"""The brain template is split into training and validation without leaks."""

import numpy as np
import sklearn  # noqa: F401  (sets variables of the environment when it is first imported)
from nilearn import datasets

from examples.demo import data as demo_data
from examples.demo.data import load_mni


def test_mni_parts_share_no_voxel_and_no_mirrored_voxel():
    data = load_mni()
    maps = datasets.load_mni152_gm_template(resolution=1), datasets.load_mni152_wm_template(resolution=1)
    train, val = data.train, data.val
    assert train.volume is val.volume
    label = train[5][1]
    x, y, z = train.corners[5]
    assert (len(train) > 700, len(val) > 400) == (True, True)
    gray, white = (d.get_fdata()[x : x + 28, y : y + 28, z : z + 28].sum() for d in maps)
    assert label == (white > gray)
    assert 0.5 <= np.bincount(val.labels.numpy()).max() / len(val) < 0.8
    seen = np.zeros(train.volume.shape, dtype=np.int8)
    for part, mark in ((train, 1), (val, 2)):
        for x, y, z in part.corners:
            seen[x : x + 28, y : y + 28, z : z + 28] |= mark
    assert set(np.unique(seen)) == {0, 1, 2}  # no voxel has both marks
    mirrored = seen[::-1]
    assert not np.any((seen > 0) & (mirrored > 0) & (seen != mirrored))
    assert not seen[:99].any()  # one hemisphere is excluded
    lowest_of_train = train.corners[:, 1].min()
    highest_of_val = val.corners[:, 1].max() + 27
    assert lowest_of_train - highest_of_val > 2 * demo_data.GAP
