"""`tetris-sglang bench`: speculation compared on real servers.

arms (what is compared) and workloads (what is asked) -> settings -> models, results -> servers -> runner;
results -> report, plots; command is what the command line calls. Only `servers` starts processes.
"""
