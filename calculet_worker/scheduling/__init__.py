"""Who goes next: admission, fairness, the arbiter between prefill and decode, and how a batch is filled."""
