"""What must hold for every pair of a host and an encoding."""
