"""A request that is executed on another node, and carried on elsewhere when that node is lost."""
