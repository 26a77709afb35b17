"""The real host: the only package that touches the operating system, the driver or a process."""
