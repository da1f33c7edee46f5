"""Which node holds which layers: plans, predictions and claims. Pure: no I/O, no clock."""
