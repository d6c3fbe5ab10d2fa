"""The stages of gpu_check.py, and the probe (probe.cu), which works without torch.

`stages` starts them, each as a process; `table` has their rows. `build` and `ranks` prepare what
the others run: `plans`, `behaviour`, `faults`, `speed` and `training`.
"""
