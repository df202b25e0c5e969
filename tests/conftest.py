"""One thread a process: the tests' tensors are small, and idle threads would busy the cores.

Nothing is tracked unless a test asks for it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WANDB_MODE"] = "disabled"
