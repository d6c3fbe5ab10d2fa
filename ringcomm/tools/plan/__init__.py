"""The commands about plans, and the same in a notebook: `draw`, `simulate` and `sweep`."""

from ringcomm.tools.plan.notebook import Drawing, Simulation, Sweep, draw, simulate, sweep

__all__ = ["Drawing", "Simulation", "Sweep", "draw", "simulate", "sweep"]
