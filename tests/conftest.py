"""One thread for torch, as runs have it: the tensors here are small, and threads that wait for each other take longer."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
