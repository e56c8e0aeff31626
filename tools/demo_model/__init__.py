"""How the bundled demo model is made: the invented company, the training samples, the network, the training."""
