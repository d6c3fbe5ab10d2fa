"""Elastic worlds as their ranks write them down: in a terminal, and as a page."""
