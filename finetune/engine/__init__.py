"""Where parameters, gradients and optimizer states live: devices, ranks, sharding and offload."""
