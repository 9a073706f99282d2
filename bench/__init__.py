"""Measurements. `python -m bench` compares every engine here, plain SGD and the peers; see docs/performance.md."""
