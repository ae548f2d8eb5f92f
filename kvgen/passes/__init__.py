"""The passes: verbs that turn one value of the IR into the next, each with a verifier.

``validate -> place -> address -> simplify -> plan -> render``, then ``compile`` and ``inspect``
in ``kvgen.backends``. A value goes down this list once; no pass looks back up.
"""
