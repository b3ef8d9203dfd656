"""How pages of KV get from the host memory of one instance into that of another."""
