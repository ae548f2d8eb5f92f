"""The check of a GPU: prepared where there is none, run where there is one, in minutes, with no compiler.

Reading order: ``recorded`` (a plan as data), ``folder`` (what a prepared folder holds), ``prepare``; then
``clock``, ``library`` (ops from the folder's cubins), ``conform``, ``scenes``, ``stopwatch``, ``tuning``,
``rivals``, ``compare`` and ``check`` (all of them in order).
"""
