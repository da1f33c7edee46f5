"""What peers measure of each other, and who may therefore serve in chains."""
