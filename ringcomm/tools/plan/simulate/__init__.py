"""`ringcomm plan simulate`: the time of a plan on links that its messages share.

topology  links and routes, by name
files     the same, from a file
flows     fair shares of links
engine    events
bounds    the least that the collective takes
path      what the last rank waited for
sweep     many sizes, ranks and algorithms, with a picture
command   the arguments and the report
"""
