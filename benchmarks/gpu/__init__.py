"""The stages of gpu_check.py, and the probe (probe.cu), which works without torch.

`stages` has their order, `running` starts each as a process, `table` has their rows, and `archive`
keeps them. `build` and `ranks` prepare what the others run: `behaviour`, `graphs`, `plans`,
`faults`, `speed`, `commands` and `mps`.
"""
