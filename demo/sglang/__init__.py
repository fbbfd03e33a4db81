"""A trainer, a vLLM engine and SGLang engines that follow it together: `python demo/run.py --sglang`."""
