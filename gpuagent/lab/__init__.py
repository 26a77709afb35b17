"""The agent on a simulated host: tried, shown (`demo`) and compared with other policies (`evaluate`)."""
