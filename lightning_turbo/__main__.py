"""``python -m lightning_turbo``: the same commands as ``lightning-turbo``."""

import sys

from lightning_turbo.cli import main

if __name__ == "__main__":
    sys.exit(main())
