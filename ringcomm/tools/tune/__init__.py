"""The command `ringcomm tune`."""
