"""The flight recorder: records of a process, the statistics made of them, and their files."""
