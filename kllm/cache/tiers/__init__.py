"""L2 and what moves blocks between the tiers."""
