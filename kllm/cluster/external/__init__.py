"""Engines of others behind the gateway: an adapter that speaks Link to the gateway and HTTP to the engine."""
