"""Tests of gpuagent.act."""
