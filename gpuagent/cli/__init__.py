"""The command line: `gpuagent COMMAND`, one file a group of commands."""
