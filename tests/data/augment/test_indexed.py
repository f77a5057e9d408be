"""IndexedDataset and IndexedCollate: collated samples keep their indices."""

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_turbo.data import PackedDataset, seed_samples
from lightning_turbo.data.augment import Indexed, IndexedCollate, IndexedDataset
from tests.data.augment.samples import Scans


class Whole(list):
    """What a dataset returns of a batch, with more than its samples."""


class Bulk(Scans):
    def __getitems__(self, indices):
        return Whole(self[index] for index in indices)


def collate_whole(samples):
    assert type(samples) is Whole
    return default_collate(list(samples))


@pytest.mark.parametrize(
    ("data", "collate"),
    [(Scans, None), (Bulk, None), (Scans, IndexedCollate()), (Bulk, IndexedCollate(collate_whole))],
)
def test_collated_samples_keep_their_indices(data, collate):
    loader = DataLoader(IndexedDataset(data()), batch_size=4, collate_fn=collate)
    for each in (loader, seed_samples(loader, seed=1)):
        batches = list(each)
        assert [batch.index for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert all(batch.index == batch.data["number"].tolist() for batch in batches)


def test_samples_that_were_changed_after_they_were_indexed_are_collated():
    data = IndexedDataset(PackedDataset(np.zeros((4, 2), np.float32)))

    class Changed(Dataset):
        def __len__(self):
            return 4

        def __getitems__(self, indices):
            samples = data.__getitems__(indices)
            samples[0] = Indexed(samples[0].index, samples[0].data + 100)
            return samples

    (batch,) = DataLoader(Changed(), 4, collate_fn=IndexedCollate(PackedDataset.collate))
    assert batch.data[:, 0].tolist() == [100, 0, 0, 0]
