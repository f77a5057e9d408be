"""The error about a missing package names the extra of lightning-turbo that installs it."""

import pytest
import torch

from lightning_turbo import DALILoader, _optional
from lightning_turbo.data.dali import DynamicPipeline
from lightning_turbo.errors import MissingExtraError


@pytest.mark.parametrize(("cuda", "extra"), [(None, "dali"), ("12.8", "dali"), ("13.0", "dali-cuda130")])
def test_without_dali_the_error_names_the_extra_for_the_cuda_of_torch(monkeypatch, cuda, extra):
    monkeypatch.setattr(_optional, "installed_version", lambda name: None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for make in (lambda: DALILoader(len, 4), lambda: DynamicPipeline(len)):
        with pytest.raises(MissingExtraError, match=rf"needs the package nvidia-dali.*\[{extra}\]"):
            make()
