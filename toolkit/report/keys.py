"""What training logs to W&B, by section of the report. The names are those of the tracker."""

STEP = "step"
ACCURACY = ("epoch/top1", "epoch/test_loss", "train/loss")
SPEED = ("train/lr", "train/samples_per_second")
DELAYS = "delay/cosine_stage_.*"  # a pattern: one curve a stage
FINAL = "final/top1"
GRID, TIMELINE = "schedule/grid", "measured/timeline"  # images
ACTIVATIONS, TRAFFIC = "schedule/activations_by_slot", "schedule/traffic_by_slot"  # tables
MEASURED_MEMORY, MEASURED_RANKS = "measured/memory", "measured/ranks"
