"""Fewer bits on the wire: hooks for DDP, and `quantized_all_reduce` for everything else."""

from ringcomm.compression import hooks
from ringcomm.compression.quantized import quantized_all_reduce

__all__ = ["hooks", "quantized_all_reduce"]
