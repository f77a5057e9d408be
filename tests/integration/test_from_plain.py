"""docs/from-plain-pytorch.md: each plain loop and its Lightning version give the same numbers, bit for bit."""

import re
import warnings
from pathlib import Path

import torch

import lightning_turbo

PAGE = Path(lightning_turbo.__file__).parent.parent / "docs" / "from-plain-pytorch.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def run(needle):
    """Run the one code block that contains ``needle`` and return its variables."""
    (code,) = [block for block in BLOCKS if needle in block]
    names = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the block prints
        exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    return names


def test_loop_and_trainer_end_with_the_same_weights():
    before, after = run("amp.initialize"), run("ApexAMP(")
    assert len(before["weights"]) == len(after["weights"]) == 6
    for a, b in zip(before["weights"], after["weights"], strict=True):
        assert torch.equal(a, b)


def test_all_loaders_give_the_same_batches():
    first = run("class DataLoaderX")["batches"]
    assert sorted(number for batch in first for number in batch) == list(range(20))
    assert run("PrefetchLoader(range")["batches"] == first


def test_every_code_block_is_tested():
    tried = ("amp.initialize", "ApexAMP(", "class DataLoaderX", "PrefetchLoader(range")
    assert [sum(needle in block for needle in tried) for block in BLOCKS] == [1] * len(tried)
