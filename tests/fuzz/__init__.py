"""A fuzzer of the Python API: ``python -m tests.fuzz --minutes 10 --seed 1``."""
