"""A package, so that no other distribution's folder of this name stands in front of it in a spawned process."""
