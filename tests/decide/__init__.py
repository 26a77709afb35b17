"""Tests of gpuagent.decide."""
