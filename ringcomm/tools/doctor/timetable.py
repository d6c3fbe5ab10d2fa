"""When each stage of the examination ends."""

# Seconds: the roll is called at ROLL of every clock, or earlier when all ranks are there.
STORE, ROLL, CONNECT, VERDICTS, MEASURE, GATHER, END = 9.0, 11.0, 15.5, 17.0, 20.5, 22.0, 24.0
PARTING = 3.0  # seconds after that, for words that wait in the store
STAGES = 4  # before the last one: for the progress
