"""The commands about plans, and the same in a notebook: ringcomm.tools.plan.notebook."""
