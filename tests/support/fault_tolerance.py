"""Marks of tests that need an MPI that survives the death of a rank (ULFM: Open MPI), or one that doesn't."""

import pytest
from launch import is_mpich

ULFM = pytest.mark.skipif(is_mpich(), reason="MPICH ends when a rank dies")
WITHOUT_ULFM = pytest.mark.skipif(not is_mpich(), reason="Open MPI has ULFM")
