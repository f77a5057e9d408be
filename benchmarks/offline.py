"""``python -m benchmarks.offline SCRIPT [ARGUMENT ...]``: run a script as on a machine without network.

What it downloads is "not found", and the files of CIFAR-10 that ``benchmarks.public`` makes count as whole:
torchvision compares their digests with those of the real ones.
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
    """Stand for ``urlretrieve`` where no file is found."""
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
