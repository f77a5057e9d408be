"""Python imports this module if its folder is on PYTHONPATH, so child processes also have simulated devices."""

import os

if os.environ.get("PRETENDED_CUDA"):
    import pretended_device  # noqa: F401
