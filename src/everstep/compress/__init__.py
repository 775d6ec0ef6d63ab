"""Gradient compression whose payload is the frame: what is sent between ranks is what is stored.

    compressor = everstep.compress.TopK(0.01)
    compressor.attach(optimizer)                                          # one process, or after any reduction
    model.register_comm_hook(compressor.state, compressor.hook)           # or: in place of DDP's all-reduce

    everstep.attach(model, optimizer, "runs/gpt", compress=compressor)    # its own state is kept, too

TopK keeps the largest elements, Quantize small codes with a scale for each block, Half 16 bits of each. What the optimizer
then consumes is exactly what the payload decodes to. `tap` is for communication hooks of others.
"""

from everstep.compress.compressor import Compressor
from everstep.compress.half import Half
from everstep.compress.quantize import Quantize
from everstep.compress.tapped import Tapped, tap
from everstep.compress.topk import TopK

__all__ = ["Compressor", "Half", "Quantize", "Tapped", "TopK", "tap"]
