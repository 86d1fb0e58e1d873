"""Properties that must hold for every pair of an architecture and an encoding."""
