"""``python -m benchmarks.offline SCRIPT [ARGUMENT ...]``: run a script without downloads.

Every download raises "404 not found". torchvision accepts the random CIFAR-10 files that ``benchmarks.public`` writes,
although their checksums differ from those of the real files.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import HTTPError


def refuse(url: str, *args: object, **kwargs: object) -> NoReturn:
    """Replace ``urlretrieve``, and find no file."""
    raise HTTPError(url, 404, "benchmarks.offline downloads nothing", Message(), None)


def main() -> None:
    """Run the script that the command line names."""
    urllib.request.urlretrieve = refuse
    if importlib.util.find_spec("torchvision"):
        cifar: Any = importlib.import_module("torchvision.datasets.cifar")
        cifar.check_integrity = lambda path, md5=None: Path(path).is_file()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
