"""``apex.parallel`` under the name of this package: each of its names raises an error with the replacement."""

import pytest

import lightning_turbo.parallel


@pytest.mark.parametrize(("name", "replacement"), [
    ("DistributedDataParallel", r"Take torch\.nn\.parallel\.DistributedDataParallel without delay_allreduce"),
    ("convert_syncbn_model", "convert_sync_batchnorm"), ("LARC", r"lightning_turbo\.lars"), ("other", "migration.md"),
])  # fmt: skip
def test_a_name_of_apex_parallel_raises_an_error_with_its_replacement(name, replacement):
    with pytest.raises(ImportError, match=rf"apex\.parallel\.{name} is not part of this package\. .*{replacement}"):
        getattr(lightning_turbo.parallel, name)
    with pytest.raises(ImportError, match=replacement):
        exec(f"from lightning_turbo.parallel import {name}")
