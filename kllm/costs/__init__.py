"""What things cost: step times, hardware and model figures, KV capacity. Arithmetic for prediction and simulation."""
