"""The KV cache: what a block is (kv_spec), who owns it (block_pool), which prefixes are kept (prefix_tree),
and what one request holds (manager). Pure Python: nothing here touches tensors."""
