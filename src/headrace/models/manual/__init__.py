"""Networks and distributions with gradients that are written out, for small networks on the CPU."""
