"""Python imports this by itself where its folder is on PYTHONPATH: then processes that are started pretend as well."""

import os

if os.environ.get("PRETENDED_CUDA"):
    import pretended_device  # noqa: F401
