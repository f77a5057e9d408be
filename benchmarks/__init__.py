"""Benchmarks: every statement about speed or memory, beside other libraries, from one command in a clone.

``python -m benchmarks NAME`` measures one suite; ``python -m benchmarks --help`` shows the names.

- ``suite``: cases, aims and suites, which are tables of plain values, and the timer that a case is given.
- ``precision``, ``overhead``, ``memory``, ``loaders``, ``augment``, ``prefetch``, ``gpu``: the tables.
- ``work``, ``peers``: the networks, data and loops that cases share; other libraries' loops and loaders.
- ``runner``, ``worker``: the one runner, whose processes run interleaved rounds, and the inside of such a process.
- ``report``, ``figures``: the one report, and its medians and ratios.
- ``resume``, ``stops``, ``charts``: samples that a stop repeats or loses, and pictures of the stored pages.
- ``answers``, ``public``: what ``tune`` finds of scripts whose answer is known, and of public ones; ``offline`` runs
  these without network, ``words`` writes a text for one.
"""
