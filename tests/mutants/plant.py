"""A pytest plugin (``-p tests.mutants.plant``): plants the fault KVGEN_MUTANT names, before tests load."""

from __future__ import annotations

import os

from tests.mutants import faults_cpp, faults_engine, faults_host, faults_oracle, faults_triton
from tests.mutants.fault import FAULTS

MODULES = (faults_cpp, faults_triton, faults_engine, faults_host, faults_oracle)

if name := os.environ.get("KVGEN_MUTANT"):
    FAULTS[name].plant()
