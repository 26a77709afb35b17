"""Tests of gpuagent.host."""
