"""Real models on kvgen's kernels: finding weights, the spec of a model, and transformers' model code.

Needs the extra ``models`` (``pip install 'kvgen[models]'``). Everything heavy is imported late.
"""
