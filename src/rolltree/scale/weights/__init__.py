"""Publishes new weights to engines that have a copy: one procedure, three ways to move the data.

    publish.py   the procedure: pause, load, drop cached keys, set and verify the version, resume
    ways.py      disk, shared memory and transfer behind one interface, and the choice per server
    shared.py    the trainer's weights as a file in memory that servers on its machine map
    transfer.py  `WeightTransfer`: a broadcast to servers, controlled by vLLM's endpoints
    buckets.py   tensors packed as bytes, with a checksum of each bucket
    channel.py   one process group per server: how its members connect, send and receive
    receive.py   the receiver of `rolltree serve`; vLLM's is in `rolltree.scale.vllm`

The engine that reads the trainer's own tensors (`rolltree.inference.local`) needs none of this.
`publish.py` and `receive.py` can be imported without torch.
"""
