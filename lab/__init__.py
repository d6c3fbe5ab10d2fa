"""Code that tests and benchmarks share. `benchmarks/lab` is a link to this folder.

ranks            ranks as processes, as tests use those of ringcomm/tools/bench
benchmark, report    what the scripts of benchmarks say alike
machine, words   links into ringcomm/tools, for what runs before ringcomm is built
programs         the C++ programs of benchmarks
wide             the C++ program of hundreds of ranks
flights          flight records of jobs that never ran
browser          pages in headless Chromium, as text and as pictures
hosts            hosts as network namespaces; `namespaces` makes and removes them
site             elastic trainings on such hosts; `slurm` is a Slurm cluster on them
output           what programs print, awaited
proxy, ports     a TCP proxy that breaks connections; ports that nobody else takes
strangers        processes that connect and are no ranks
limits           limits of time, and the seed of samples
documents        the pages of the documentation, taken apart
oracle           what every collective has to give; `pair` compares programs with Gloo's results
outcomes         how a call ended, in a child that may die
simulated_device, simulated_plans    a device made of threads; the time of plans by a model
membership       elastic processes in virtual time; `membership_rules` can be switched off
simulated_time, simulated_store, simulated_group, simulated_world    its stand-ins
zygote           programs that start at once, forked; `zygote_client` starts them
faults           the fault table: its rows, and the programs that they run
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the repository
# Where `python -m lab.…` runs: the root, or benchmarks/ for what is started there. So the root's
# folder ringcomm/ does not hide an installed one.
START = Path(__file__).parent.parent
