"""MixUp and CutMix mix labels as they mix images."""

import torch

from lightning_turbo import augment
from lightning_turbo.data.augment import BatchAugmentation


def test_mixup_and_cutmix_mix_labels_as_images():
    n = 64
    image = torch.arange(float(n)).view(n, 1, 1, 1).repeat(1, 1, 20, 20)
    label = torch.arange(n)
    before = torch.arange(n).roll(1)
    mixed, soft = BatchAugmentation([augment.MixUp(n, 0.4, p=0.7)], 0, label=1)((image, label), range(n))
    share = soft[label, label]
    assert torch.equal(soft.sum(1), torch.ones(n))
    assert 5 < (share == 1).sum() < 40
    torch.testing.assert_close(mixed[:, 0, 0, 0], share * label + (1 - share) * before)
    both = {"image": image, "mask": label.view(n, 1, 1).repeat(1, 20, 20), "label": label}
    cut = BatchAugmentation([augment.CutMix(n)], 0, image="image", mask="mask", label="label")(both, range(n))
    assert torch.equal(cut["image"][:, 0].long(), cut["mask"])
    share = (cut["mask"] == label.view(n, 1, 1)).float().mean((1, 2))
    torch.testing.assert_close(cut["label"][label, label], share)
    torch.testing.assert_close(cut["label"][label, before], 1 - share)
    # The parameters are those of the sample whatever is beside it; then labels may be mixed twice.
    steps = [augment.MixUp(n), augment.CutMix()]
    twice = BatchAugmentation(steps, 0, label=1)((image, label), range(n))[1]
    torch.testing.assert_close(twice.sum(1), torch.ones(n))


def test_cutmix_of_masks_alone_pastes_them_as_images():
    n = 16
    image = torch.arange(float(n)).view(n, 1, 1, 1).repeat(1, 1, 20, 20)
    mask = torch.arange(n).view(n, 1, 1).repeat(1, 20, 20)
    cut, pasted = BatchAugmentation([augment.CutMix(n)], 0, mask=1)((image, mask), range(n))
    assert torch.equal(cut[:, 0].long(), pasted)
    assert not torch.equal(pasted, mask)
