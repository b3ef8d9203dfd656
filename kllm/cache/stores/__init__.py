"""L3: blocks outside the instance, by content hash."""
