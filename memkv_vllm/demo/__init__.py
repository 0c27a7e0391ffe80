"""``make demo``: real vLLM, a real store and a restart between them, on one machine without a GPU.

``__main__`` tells the story and judges it; ``vllm_process`` is one vLLM engine in a process of its own; ``store`` is
the server's process as the demo sees it; ``model`` makes the tiny model; ``report`` prints.
"""
