"""What models are worth at each length: retrieval, its intervals, and the time that it takes."""
