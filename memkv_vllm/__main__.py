"""``python -m memkv_vllm`` is the ``memkv`` command."""

from memkv_vllm.cli import main

if __name__ == "__main__":
    main(prog_name="memkv")
