"""What meets vLLM: the spec's manager and worker, the KV layout, the movers. The only users of vllm and torch.

``compat`` is the only module that imports vLLM's names; ``gather`` the only one that touches KV tensors.
"""
