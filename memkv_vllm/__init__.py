"""memkv-vllm: a MemKV cluster as the offload medium of vLLM's native KV offloading.

Importing this package reads no environment, opens nothing and needs none of vLLM, torch or pyverbs.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
