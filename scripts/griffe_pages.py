"""What griffe, which reads the sources for the API pages, is told beyond its defaults."""

import re

import griffe


class Pages(griffe.Extension):
    """Renames a section of docstrings, and shows values in place of names of constants."""

    def on_object(self, *, obj, **_):
        """Let griffe know the section ``Example:``, which it calls ``Examples:``."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)

    def on_package(self, *, pkg, **_):
        """Replace defaults by their values once every module that may hold a constant is read."""
        for function in _functions(pkg):
            for parameter in function.parameters:
                if isinstance(parameter.default, griffe.ExprName) and parameter.default.name.isupper():
                    # A constant may be imported from another module of the package.
                    constant = pkg.modules_collection[parameter.default.canonical_path]
                    parameter.default = constant.final_target.value if constant.is_alias else constant.value


def _functions(owner):
    for member in owner.members.values():
        if member.is_alias:
            continue
        if member.is_function:
            yield member
        elif member.is_module or member.is_class:
            yield from _functions(member)
