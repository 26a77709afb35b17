"""Tests of gpuagent.sense."""
