"""The engine: plans become tokens. core (plan, execute, commit), runner and sampler (the model's side of a step),
instance (the core behind a Link), loading (from a config to a running engine)."""
