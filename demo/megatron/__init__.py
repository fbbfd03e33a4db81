"""A trainer in Megatron's layout and a tensor-parallel engine that follows it: `python demo/run.py --megatron`."""
