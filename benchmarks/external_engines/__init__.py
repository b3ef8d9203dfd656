"""External engines behind a gateway: starting them, and the load that shows what routing is worth."""
