"""An extension of griffe, which reads the sources for the API pages."""

import re

import griffe


class Pages(griffe.Extension):
    """Renames a docstring section, and replaces names of constants by their values."""

    def on_object(self, *, obj, **_):
        """Rename the section ``Example:`` to ``Examples:``, which griffe recognizes."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)

    def on_package(self, *, pkg, **_):
        """Replace constants in defaults by their values, after all modules are read."""
        for function in _functions(pkg):
            for parameter in function.parameters:
                if isinstance(parameter.default, griffe.ExprName) and parameter.default.name.isupper():
                    # The constant may be imported from another module of the package.
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
