"""Faults injected into whole runs: kills, full disks, damaged files, dying workers, memory that runs out, clocks that jump.

`python -m tests.faults` does all of them and prints a table; `make test` does a few of each kind. Every case starts as a fork of
one warm process, so that it costs a fraction of a second. Of every case that ends early the same is asked: the run says in one
sentence what is wrong or is dead, the ledger counts at least the noised sums that there were, and the same command takes the run
to the end that it would have had, to the byte.
"""
