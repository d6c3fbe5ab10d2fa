"""The parts of `ringcomm bench`. Tests and the other benchmarks use them, too.

command       the command: its arguments
measurement   measures what they ask for, and writes the figures
collectives   times collectives on several backends in turn; ddp does so with steps of training
cases         the collectives: how each is called, and what it must give
traits        tables of collectives, types and operations; how a collective is rated
sample        one measured size, as texts, as JSON and as CSV
figures       the page of a report
ranks         ranks as processes; measured has those that are timed, and how they meet and leave
machine       the machine that was measured
report        spreads, times and tables as texts
trust         which figures are in doubt: others were busy, or the rounds differ too much
"""
