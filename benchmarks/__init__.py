"""Benchmarks: every statement about speed or memory, beside other libraries, from one command in a clone.

``python -m benchmarks precision`` measures one suite, ``python -m benchmarks --help`` shows the rest.
"""
