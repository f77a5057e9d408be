"""Lets griffe, which reads the docstrings for the API pages, know the section ``Example:``, which it calls ``Examples:``."""

import re

import griffe


class Examples(griffe.Extension):
    """Renames the section of each docstring."""

    def on_object(self, *, obj, **_):
        """Rename it in one docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
