"""`ringcomm plan search`: find a plan for a network whose links differ.

matching  chunks and links, in time: what is sent when, for one try
writing   an algorithm by hand that does so, as a Python file
tries     many tries, and the one that is fastest by simulation
command   the arguments, the proof and the report
"""
