"""``apex.parallel`` under this package's name: each name of it is an error that says what to take."""

import pytest

import lightning_turbo.parallel


@pytest.mark.parametrize(("name", "said"), [
    ("DistributedDataParallel", r"Take torch\.nn\.parallel\.DistributedDataParallel without delay_allreduce"),
    ("convert_syncbn_model", "convert_sync_batchnorm"), ("LARC", r"lightning_turbo\.lars"), ("other", "migration.md"),
])  # fmt: skip
def test_a_name_of_apex_parallel_says_what_to_take(name, said):
    with pytest.raises(ImportError, match=rf"apex\.parallel\.{name} is not part of this package\. .*{said}"):
        getattr(lightning_turbo.parallel, name)
    with pytest.raises(ImportError, match=said):
        exec(f"from lightning_turbo.parallel import {name}")
