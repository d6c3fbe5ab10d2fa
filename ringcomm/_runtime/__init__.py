"""The backend in a process: registration, settings, groups, and the end of the program."""
