"""New weights to engines that hold a copy: one frame (`publish.py`), three ways to carry them.

    publish.py   pause, load, forget cached keys, set the version, ask for it, resume
    ways.py      disk, shared memory, transfer behind one interface, and which one a server takes
    shared.py    the trainer's weights as a file in memory that servers on its machine map
    transfer.py  `WeightTransfer`: a broadcast to servers, with vLLM's endpoints as its control
    buckets.py   tensors packed as bytes, with a checksum of each bucket
    channel.py   one process group per server: how its members meet, send and receive
    receive.py   the side of `rolltree serve`; vLLM's is in `rolltree.inference.vllm`

The engine that reads the trainer's own tensors (`rolltree.inference.local`) needs none of it.
`publish.py` alone imports no torch.
"""
