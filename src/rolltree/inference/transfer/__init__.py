"""Weights from a trainer to servers without a disk: broadcast in process groups of their own.

    buckets.py    tensors packed as bytes, with a checksum of each bucket
    channel.py    one process group per server: how its members meet, send and receive
    publisher.py  `WeightTransfer`: the trainer's side, with vLLM's endpoints as its control

The servers' sides are `rolltree.inference.vllm.transfer` and `rolltree.inference.server.weights`.
The package needs torch.
"""
