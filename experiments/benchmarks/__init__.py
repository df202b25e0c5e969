"""What ``experiments/bench.py`` can run."""
