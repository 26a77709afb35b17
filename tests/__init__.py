"""The tests of gpuagent, laid out as the package is."""
