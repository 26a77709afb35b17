"""A GPU host in software behind the same protocols as `host/`: cards with physics, tenants at work."""
