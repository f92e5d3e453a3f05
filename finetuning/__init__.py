"""Fine-tuning for whole and split models: base model, adapters, data, training loop and metrics.

Nothing in this package depends on federated learning.
"""

import logging

# Silence two loggers, before PEFT imports bitsandbytes: the first reports at each import that
# bitsandbytes uses its own kernels; the second reports at each matrix product that the product is
# computed in float16.
for _name in ("bitsandbytes.backends.cpu.ops", "bitsandbytes.autograd._functions"):
    logging.getLogger(_name).setLevel(logging.ERROR)
