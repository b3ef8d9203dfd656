"""Weights and cached values in few bits: from floats to bytes and back. No model, no file."""
