"""Fakes of the libraries and daemons around gpuagent, for its tests and benchmarks."""
