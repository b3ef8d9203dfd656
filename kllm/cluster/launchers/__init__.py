"""Ways of starting instances: the contract, and one file per way."""
