"""What the agent costs and how fast it is, measured against the budgets of DESIGN 8 (`make bench`)."""
