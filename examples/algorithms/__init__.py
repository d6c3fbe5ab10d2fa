"""Algorithms by hand, each by its paper: see docs/by_hand.md."""
