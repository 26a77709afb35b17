"""The whole agent as its users meet it: a daemon process, real tenants, the socket, the files."""
