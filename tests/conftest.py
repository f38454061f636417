"""One thread for torch, as runs have it: the tensors here are small, so that threads mostly wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
