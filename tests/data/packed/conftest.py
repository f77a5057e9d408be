"""NIfTI files for the tests of packing."""

import pytest

from tests.data.packed.files import AFFINE


@pytest.fixture
def nifti(tmp_path):
    nibabel = pytest.importorskip("nibabel")

    def save(name, array, affine=AFFINE, **header):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = nibabel.Nifti1Image(array, affine)
        for key, value in header.items():
            getattr(image.header, key)(*value)
        nibabel.save(image, path)
        return array

    return save
