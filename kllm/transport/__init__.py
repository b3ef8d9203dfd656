"""Links between a gateway and its instances: the contract, and one file per way of carrying messages."""
