"""Reference implementations: the meaning of each kernel, in torch alone and with static shapes."""
