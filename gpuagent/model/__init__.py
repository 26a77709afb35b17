"""Plain frozen values: what can be read and turned, who exists, what is known, what is wished."""
