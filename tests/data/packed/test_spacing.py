"""pack_folder(spacing=) beside MONAI's Spacing."""

import numpy as np
import pytest
import torch

from lightning_turbo.data import PackedDataset, pack_folder
from lightning_turbo.data.packed.volumes import _resample

CASES = {
    "finer and coarser": ((20, 25, 13), (1.5, 0.8, 3.0), (1.0, 1.1, 1.0)),
    "coarser": ((30, 20, 11), (1, 1, 1), (1.7, 2.1, 1)),
    "one slice": ((5, 4, 1), (1, 1, 5), (0.5, 0.5, 1)),
    "few slices": ((9, 7, 3), (0.7, 0.7, 5), (1, 1, 1.1)),
    "two slices that become far ones": ((9, 7, 2), (0.7, 0.7, 5), (1, 1, 9)),
    "as it is": ((6, 5, 4), (1, 2, 3), (1, 2, 3)),
}


def monai(volume, affine, spacing, mode):
    """The volume and affine that MONAI's Spacing gives."""
    transforms, data = pytest.importorskip("monai.transforms"), pytest.importorskip("monai.data")
    spaced = transforms.Spacing(spacing, mode=mode, padding_mode="nearest" if mode == 3 else "border")
    result = spaced(data.MetaTensor(torch.as_tensor(volume).float(), affine=torch.as_tensor(affine)))
    return result.numpy(), result.affine.numpy()


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_volumes_are_those_of_monais_spacing(kind, flip):
    shape, old, new = CASES[kind]
    volume = (np.random.default_rng(0).normal(size=(2, *shape)) * 500).astype(np.int16)
    affine = np.diag([*old, 1.0])
    affine[:3, 3] = 5, -3, 2
    affine[0] *= -1 if flip else 1
    steps = np.divide(new, old).tolist()
    expected, _ = monai(volume, affine, new, 3)
    found = _resample(volume.astype(np.float32), np.array(steps), nearest=False)
    assert (found.dtype, found.shape) == (np.float32, expected.shape)
    assert np.abs(found - expected).max() < 2e-3
    labels = _resample(volume, np.array(steps), nearest=True)
    assert labels.dtype == np.int16
    assert np.array_equal(labels, monai(volume, affine, new, "nearest")[0])


def test_splines_go_through_the_voxels_and_follow_a_smooth_volume():
    grid = np.arange(40.0)
    volume = np.sin(grid / 4)[:, None, None] * np.cos(grid[:30] / 5)[:, None] * np.ones(3)
    found = _resample(volume.astype(np.float32), np.array((0.5, 0.25, 1)), nearest=False)
    assert np.abs(found[::2, ::4] - volume).max() < 1e-5
    places = np.arange(8, 70) / 2
    exact = np.sin(places / 4)[:, None, None] * np.cos(np.arange(16, 100) / 4 / 5)[:, None] * np.ones(3)
    assert np.abs(found[8:70, 16:100] - exact).max() < 1e-3


@pytest.mark.parametrize("channels", [False, True])
def test_packed_scans_have_the_spacing_that_was_asked_for(nifti, tmp_path, channels):
    affine = np.array([[0, -1.5, 0, 90], [0.8, 0, 0, -126], [0, 0, 3, -72], [0, 0, 0, 1]])  # turned, and flipped
    generator = np.random.default_rng(0)
    volume = generator.integers(-99, 999, (11, 9, 6, 2) if channels else (11, 9, 6)).astype(np.int16)
    label = generator.integers(0, 3, (11, 9, 6)).astype(np.uint8)
    nifti("scans/a.nii.gz", volume, affine)
    nifti("masks/a.nii.gz", label, affine)
    spacing = (1.02, 1.3, 2.9)  # no place lies half between two voxels
    pack_folder(tmp_path / "scans", tmp_path / "out", labels=tmp_path / "masks", spacing=spacing)
    names = ("volumes", "labels", "affine", "spacing")
    image, mask, place, distances = PackedDataset(tmp_path / "out", keys=names)[0]
    first = np.moveaxis(volume, 3, 0) if channels else volume[None]
    expected, its_affine = monai(first, affine, spacing, 3)
    assert np.abs(image.numpy() - (expected if channels else expected[0])).max() < 2e-3
    assert np.array_equal(mask.numpy(), monai(label[None], affine, spacing, "nearest")[0][0])
    assert (image.dtype, mask.dtype) == (torch.float32, torch.int16)
    assert np.allclose(place, its_affine, atol=1e-5)
    assert np.allclose(distances, spacing, atol=1e-5)


def test_a_size_counts_voxels_of_the_new_spacing(nifti, tmp_path):
    nifti("in/a.nii.gz", np.ones((10, 10, 10), np.int16), np.eye(4))
    pack_folder(tmp_path / "in", tmp_path / "out", spacing=(0.5, 1, 2), size=(21, 8, 5))
    volume, affine = PackedDataset(tmp_path / "out", keys=("volumes", "affine"))[0]
    assert volume.shape == (21, 8, 5)
    assert affine.diagonal().tolist() == [0.5, 1, 2, 1]
    assert affine[:3, 3].tolist() == [-0.5, 1, 0]  # its 19 x 10 x 5 voxels, padded and cut about their center


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_a_file_without_spacing_is_not_resampled(tmp_path, bad):
    nibabel = pytest.importorskip("nibabel")
    (tmp_path / "in").mkdir()
    image = nibabel.Nifti1Image(np.ones((3, 4, 5), np.float32), None)
    image.set_sform(np.eye(4), 1)
    content = bytearray(image.to_bytes())
    content[312:328] = np.array([0, 0, bad, 0], np.float32).tobytes()  # the last row of the sform
    (tmp_path / "in" / "a.nii").write_bytes(content)
    with pytest.raises(ValueError, match=r"a.nii': spacing of the file: expected spacings above 0, to resample it"):
        pack_folder(tmp_path / "in", tmp_path / "out", spacing=(1, 1, 1))


@pytest.mark.parametrize("spacing", [1, (1, 1), (1, 1, 0), (1, 1, "1"), (1, 1, float("nan"))])
def test_what_is_no_spacing(nifti, tmp_path, spacing):
    nifti("in/a.nii.gz", np.ones((3, 3, 3), np.int16), np.eye(4))
    with pytest.raises(ValueError, match="spacing: expected three distances in millimeters above 0, or None"):
        pack_folder(tmp_path / "in", tmp_path / "out", spacing=spacing)
