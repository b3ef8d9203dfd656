"""A fleet in virtual time: the production gateway, scheduler, cache and instances on simulated hardware and links."""
