"""gpuagent keeps the promises made to the tenants of a shared GPU host."""

__version__ = "0.1.0"
