"""One thread a process: the tests' tensors are small, and idle threads would busy the cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
