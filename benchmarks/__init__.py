"""Benchmarks: every statement about speed or memory can be measured again with one command in a clone.

``python -m benchmarks NAME`` measures one suite; ``python -m benchmarks --help`` lists the names.

- ``suite``: the classes ``Case``, ``Aim`` and ``Suite``, and the ``CaseTimer`` that each case receives.
- ``precision``, ``overhead``, ``memory``, ``saves``, ``groups``, ``loaders``, ``loading``, ``augment``, ``patches``,
  ``prefetch``, ``lengths``, ``gpu``: the suites.
- ``work``, ``training``, ``peers``: networks, data and training loops that cases share: of plain PyTorch, of Lightning,
  and of other libraries.
- ``runner``, ``worker``, ``forks``: the runner measures processes in interleaved rounds; a worker is one such process.
- ``report``, ``figures``: the report, and its medians and ratios.
- ``resume``, ``stops``: which samples a run repeats or loses when it is stopped.
- ``networks``: networks of other packages at each level.
- ``charts``: the pictures of the stored pages.
- ``answers``, ``public``: what ``tune`` recommends for scripts whose answer is known, and for public scripts.
  ``offline`` runs the latter without network, and ``words`` writes the text that one of them reads.
"""
