"""What `ttnorm demo` runs."""
